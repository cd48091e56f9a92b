#!/usr/bin/env python3
"""dsq's runtime beside the other runtimes in Rust, in turns, on all cores: mistral.rs (PyPI `mistralrs`) and candle (the crate in
`tests/peers/candle`, built for this machine: RUSTFLAGS=-Ctarget-cpu=native). Decoding behind a short prompt, and a prompt of 512.
Prints JSON: medians, and the median ratio of the rounds (dsq over the peer)."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import random
import re
import statistics
import subprocess


def dsq(args, prompt, gen):
    command = [args.dsq, "bench", args.folder, "--json", "--repeat", 1, "--prompt-tokens", prompt, "--gen-tokens", gen,
               "--activations", args.activations]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)["rows"][0]
    return {"prompt": row["prompt_tokens_per_second"], "decode": row["tokens_per_second"]}


def candle(args, prompt, gen):
    done = subprocess.run([str(args.candle), str(args.gguf), str(prompt), str(gen)], capture_output=True, text=True, check=True)
    prompt, decode = map(float, re.findall(r"[\d.]+", done.stdout))
    return {"prompt": prompt, "decode": decode}


class MistralRs:
    def __init__(self, gguf):
        from mistralrs import Runner, Which

        self.runner = Runner(which=Which.GGUF(quantized_model_id=str(gguf.parent), quantized_filename=gguf.name))
        self.round = 0

    def __call__(self, _, prompt, gen):
        from mistralrs import CompletionRequest

        # Another text each time: it keeps the cache of a prompt that it has seen.
        self.round += 1
        words = random.Random(self.round)
        text = " ".join(words.choice(["hello", "world", "again", "time"]) for _ in range(prompt))
        request = CompletionRequest(model="default", prompt=text, max_tokens=gen, temperature=0.0)
        usage = self.runner.send_completion_request(request).usage
        return {"prompt": usage.prompt_tokens / usage.total_prompt_time_sec, "decode": (usage.completion_tokens - 1) / usage.total_completion_time_sec}


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--dsq", type=pathlib.Path, required=True)
    ap.add_argument("--folder", type=pathlib.Path, required=True, help="the packed model that dsq runs")
    ap.add_argument("--gguf", type=pathlib.Path, required=True, help="the same model for the peers (pure Q4_0, see bench_runtime.py)")
    ap.add_argument("--candle", type=pathlib.Path, help="the program of tests/peers/candle")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--activations", default="int8")
    args = ap.parse_args()
    peers = {f"mistral.rs {importlib.metadata.version('mistralrs')}": MistralRs(args.gguf.resolve())}
    if args.candle:
        peers["candle"] = candle
    for what, prompt, gen in [("decode", 8, 128), ("prompt", 512, 4)]:
        for name, peer in peers.items():
            peer(args, prompt, gen)                                                   # warm up
            rows = [(peer(args, prompt, gen)[what], dsq(args, prompt, gen)[what]) for _ in range(args.rounds)]
            ratios = [ours / theirs for theirs, ours in rows]
            print(json.dumps({
                "case": what, "peer": name, "tokens_per_second": round(statistics.median(r[0] for r in rows), 1),
                "dsq": round(statistics.median(r[1] for r in rows), 1), "ratio": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2), "most": round(max(ratios), 2), "load_average": os.getloadavg()[0],
            }), flush=True)


if __name__ == "__main__":
    main()
