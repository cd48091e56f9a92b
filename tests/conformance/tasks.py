#!/usr/bin/env python3
"""Scores of `dsq eval --tasks` against transformers on the same requests: log-likelihoods, tokens, greedy matches, accuracies.

    VENV/bin/python tests/conformance/tasks.py --model ~/.cache/dsq/smollm2.gguf --items 100 TASKS/*/rc_0shot/requests.jsonl.gz

transformers runs the folder that `dsq export --format safetensors` makes of the model, in f32 with eager attention, one item a batch,
padded on the right (no token sees what is behind it). The requests are read and cut here by the rules of docs/evaluation.md, without dsq.
"""

import argparse
import gzip
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Nats a token. Both sides compute in f32. run.py holds logits to 1e-4 of the largest, and a log probability may be off by twice
# that: 2e-4 of logits of about 20.
TOKEN_BOUND = 2e-4 * 20
RULES = ("accuracy", "accuracy_per_byte", "accuracy_per_token")


def read_items(path, count):
    """The first items of a file, each a list of requests; those behind an empty question are left out."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        requests = (json.loads(line) for line in lines)
        asked = (r for r in requests if r["doc_id"] < 1_000_000)
        groups = (list(g) for _, g in itertools.groupby(asked, lambda r: r["doc_id"]))
        return list(itertools.islice(groups, count))


def encode_pair(tokenizer, context, continuation):
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, before = tokenizer(context + continuation).input_ids, tokenizer(context).input_ids
    if not before:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        whole, before = [first, *whole], [first]
    return whole, len(before)


def score_item(model, tokenizer, item):
    import torch
    limit = model.config.max_position_embeddings
    pairs = []
    for r in item:
        tokens, start = encode_pair(tokenizer, r["request"]["context"], r["request"]["continuation"])
        cut = max(0, len(tokens) - limit - 1)
        pairs.append((tokens[cut:], start - cut))
    width = max(len(tokens) for tokens, _ in pairs) - 1
    ids = torch.tensor([tokens[:-1] + [0] * (width + 1 - len(tokens)) for tokens, _ in pairs])
    first = min(start for _, start in pairs) - 1
    logits = model(ids, logits_to_keep=width - first).logits
    out = []
    for row, (tokens, start) in zip(logits, pairs):
        rows, targets = row[start - 1 - first:len(tokens) - 1 - first], torch.tensor(tokens[start:])
        log_p = rows.double().log_softmax(-1).gather(-1, targets[:, None])
        out.append((log_p.sum().item(), len(targets), bool((rows.argmax(-1) == targets).all())))
    return out, sum(len(tokens) - 1 for tokens, _ in pairs)


def best(values):
    return max(range(len(values)), key=lambda i: values[i])


def metrics(items, scores):
    """As docs/evaluation.md defines them; and by how little the closest choice was made, a token."""
    hits, bits, greedy, margin = {rule: 0 for rule in RULES}, 0.0, 0, math.inf
    for item, answers in zip(items, scores):
        gold = item[0]["label"] if len(item) > 1 else 0
        sizes = [len(r["request"]["continuation"].encode()) for r in item]
        for rule, values in zip(RULES, ([a[0] for a in answers], [a[0] / n for a, n in zip(answers, sizes)],
                                        [a[0] / a[1] for a in answers])):
            hits[rule] += best(values) == gold
            if len(item) > 1:
                top, second = sorted(values, reverse=True)[:2]
                margin = min(margin, top - second)
        bits -= answers[gold][0] / (math.log(2) * sizes[gold])
        greedy += answers[gold][2]
    n = len(items)
    out = {"bits_per_byte": bits / n, "greedy": greedy / n}
    if any(len(item) > 1 for item in items):
        out |= {rule: hits[rule] / n for rule in RULES}
    return out, margin


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--dsq", type=pathlib.Path, default=ROOT / "target" / "release" / "dsq")
    ap.add_argument("--model", type=pathlib.Path, required=True, help="a model that dsq reads")
    ap.add_argument("--folder", type=pathlib.Path, help="the model as a folder of transformers, if there is one")
    ap.add_argument("--items", type=int, default=100)
    ap.add_argument("tasks", type=pathlib.Path, nargs="+")
    args = ap.parse_args()

    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    failed = False
    with tempfile.TemporaryDirectory(prefix="dsq-tasks-") as tmp:
        folder, answers = args.folder or pathlib.Path(tmp) / "model", pathlib.Path(tmp) / "answers.jsonl"
        if not args.folder:
            subprocess.run([args.dsq, "export", args.model, "--format", "safetensors", "--out", folder], check=True, capture_output=True)
        done = subprocess.run([args.dsq, "eval", args.model, "--json", "--max-items", str(args.items), "--answers-out", answers,
                               "--tasks", *args.tasks], check=True, capture_output=True, text=True)
        rows = json.loads(done.stdout)["rows"]
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for path, row in zip(args.tasks, rows, strict=True):
        items, problems = read_items(path, args.items), []
        ours, lines = lines[:len(items)], lines[len(items):]
        start = time.monotonic()
        theirs, given = zip(*(score_item(model, tokenizer, item) for item in items))
        seconds = time.monotonic() - start
        worst = 0.0
        for item, mine, want in zip(items, ours, theirs, strict=True):
            where = f"doc_id {item[0]['doc_id']}"
            if mine["doc_id"] != item[0]["doc_id"] or len(mine["answers"]) != len(want):
                problems.append(f"{where}: another item")
                continue
            for a, (value, count, greedy) in zip(mine["answers"], want):
                worst = max(worst, abs(a["log_likelihood"] - value) / count)
                if (a["tokens"], a["greedy"]) != (count, greedy):
                    problems.append(f"{where}: {a['tokens']} tokens, greedy {a['greedy']}; transformers: {count}, {greedy}")
        want, margin = metrics(items, theirs)
        for name, value in want.items():
            if abs(row[name] - value) > (worst / math.log(2) * 4 if name == "bits_per_byte" else 1e-12):
                problems.append(f"{name} {row[name]}; transformers: {value}")
        if worst > TOKEN_BOUND:
            problems.append(f"log-likelihoods off by {worst:.1e} nats a token, at most {TOKEN_BOUND:.0e} allowed")
        failed |= bool(problems)
        shown = ", ".join(f"{k} {v:.4f}" for k, v in want.items())
        print(f"{'FAIL' if problems else 'PASS'}  {row['name']}: {len(items)} items, {row['requests']} requests; {shown}; log-likelihoods "
              f"differ by at most {worst:.1e} nats a token; closest choice by {margin:.1e}; positions a second: dsq "
              f"{row['positions_per_second']:.0f}, transformers {sum(given) / seconds:.0f}", flush=True)
        for p in problems[:5]:
            print(f"      {p}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
