#!/usr/bin/env python3
"""dsq's runtime beside llama.cpp, in turns on the same cores: decoding from an empty context, a prompt of 512, 16 sequences decoded
together, decoding at a long context. Prints JSON: every run, medians, and the median ratio of the rounds (dsq over llama.cpp)."""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import time

import llama_cpp as lib

from bench_llama_cpp import Session, requantize, types_of
from run import find_gguf


class Peer(Session):
    def together(self, sequences, n):
        """Tokens per second of n steps of `sequences` sequences, one token each, all sequences together."""
        self.clear()
        batch = lib.llama_batch_init(sequences, 0, 1)
        batch.n_tokens = sequences
        start = time.perf_counter()
        for i in range(n):
            for s in range(sequences):
                batch.token[s] = (7 + 13 * i + 31 * s) % self.vocab
                batch.pos[s] = i
                batch.n_seq_id[s] = 1
                batch.seq_id[s][0] = s
                batch.logits[s] = 1
            if lib.llama_decode(self.ctx, batch):
                raise SystemExit("error: llama_decode failed")
            lib.llama_synchronize(self.ctx)
        rate = sequences * n / (time.perf_counter() - start)
        lib.llama_batch_free(batch)
        return rate

    def behind(self, context, n):
        """Tokens per second of n single-token steps behind `context` tokens."""
        self.clear()
        for at in range(0, context, 512):
            self.decode([(7 + 13 * i) % self.vocab for i in range(at, min(at + 512, context))])
        start = time.perf_counter()
        for i in range(n):
            self.decode([(7 + 13 * i) % self.vocab])
        return n / (time.perf_counter() - start)


def open_peer(path, threads, sequences, context):
    model_params = lib.llama_model_default_params()
    model_params.n_gpu_layers = 0
    peer = Peer.__new__(Peer)
    peer.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = context, sequences, False
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = threads
    peer.ctx = lib.llama_init_from_model(peer.model, params)
    if not peer.model or not peer.ctx:
        raise SystemExit(f"error: {path}: llama.cpp cannot load it")
    peer.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(peer.model))
    return peer


def dsq(args, threads, prompt, gen, batch=1):
    command = [args.dsq, "bench", args.folder, "--json", "--threads", threads, "--repeat", 1, "--prompt-tokens", prompt,
               "--gen-tokens", gen, "--batch", batch, "--activations", args.activations, "--kv-type", "f16"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["rows"][0]


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--dsq", type=pathlib.Path, required=True)
    ap.add_argument("--folder", type=pathlib.Path, required=True, help="the packed model that dsq runs")
    ap.add_argument("--gguf", type=pathlib.Path, default=find_gguf(), help="the same model for llama.cpp, requantized to pure Q4_0")
    ap.add_argument("--as-is", action="store_true", help="take the given file, do not requantize it")
    ap.add_argument("--work", type=pathlib.Path, required=True, help="where the requantized file is kept")
    ap.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--context", type=int, default=4096)
    ap.add_argument("--gen", type=int, default=128)
    ap.add_argument("--activations", default="int8")
    ap.add_argument("--only", nargs="+", choices=["decode", "prompt", "batch 16", "context"])
    args = ap.parse_args()
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p())
    lib.llama_backend_init()
    model = args.gguf
    if not args.as_is:
        model = args.work / f"{args.gguf.stem}.pure-Q4_0.gguf"
        if not model.exists():
            part = model.with_suffix(".part")
            requantize(args.gguf, part, lib.LLAMA_FTYPE_MOSTLY_Q4_0, True)
            part.replace(model)
    weights = sum(f.stat().st_size for f in args.folder.glob("*.safetensors"))
    print(json.dumps({"llama_cpp": lib.__version__, "system": lib.llama_print_system_info().decode().strip(),
                      "file_bytes": model.stat().st_size, "tensor_types": types_of(model), "folder_bytes": weights}))
    short = args.context + args.gen + 64
    for threads in args.threads:
        one = open_peer(model, threads, 1, short)
        many = open_peer(model, threads, 16, 16 * (args.gen + 64))
        one.prefill(64), one.generate(8), many.together(16, 4)                        # warm up
        cases = {
            "decode": (lambda: one.generate(args.gen), lambda: dsq(args, threads, 1, args.gen), "tokens_per_second"),
            "prompt": (lambda: one.prefill(512), lambda: dsq(args, threads, 512, 1), "prompt_tokens_per_second"),
            "batch 16": (lambda: many.together(16, args.gen // 2), lambda: dsq(args, threads, 1, args.gen // 2, 16), "tokens_per_second"),
            "context": (lambda: one.behind(args.context, 32), lambda: dsq(args, threads, args.context, 32), "tokens_per_second"),
        }
        for name, (theirs, ours, key) in cases.items():
            if args.only and name not in args.only:
                continue
            peer, own, shares = [], [], []
            for _ in range(args.rounds):
                peer.append(theirs())
                row = ours()
                own.append(row[key])
                shares.append(row["bandwidth_share"])
            ratios = [b / a for a, b in zip(peer, own)]
            print(json.dumps({
                "case": name, "threads": threads, "llama_cpp": round(statistics.median(peer), 1), "dsq": round(statistics.median(own), 1),
                "ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                "bandwidth_share": round(statistics.median(shares), 3), "load_average": os.getloadavg()[0],
            }), flush=True)


if __name__ == "__main__":
    main()
