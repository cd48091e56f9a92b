#!/usr/bin/env python3
"""llama.cpp's block quantizers beside dsq's, on the same f16 values in memory and two threads, in MB of f16 a second.

Rounds alternate: llama.cpp's ggml_quantize_chunk (f16 to f32 by ggml_fp16_to_fp32_row, then blocks, 65,536 values at a time, taken from
one counter by two threads), then dsq's example gguf_speed. The last round of each is compared: bytes, and root mean square errors in f64
of what PyPI gguf decodes. Rates are by the clock and, `_cpu`, by CPU time of both threads together. Build the example first: cargo build --release --workspace --examples.
"""

import argparse
import ctypes
import importlib.metadata
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import threading
import time

import gguf
import llama_cpp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = [("Q4_0", gguf.GGMLQuantizationType.Q4_0), ("Q4_K", gguf.GGMLQuantizationType.Q4_K), ("Q6_K", gguf.GGMLQuantizationType.Q6_K)]
CHUNK = 1 << 16


def load():
    lib = ctypes.CDLL(str(next((pathlib.Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so"))))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    lib.ggml_fp16_to_fp32_row.restype = None
    lib.ggml_fp16_to_fp32_row.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return lib


def values(seed, n):
    """The values of gguf_speed.rs."""
    out = np.empty(n, dtype=np.float16)
    for a in range(0, n, 1 << 20):
        with np.errstate(over="ignore"):
            z = np.uint64(seed) + np.arange(a + 1, a + (1 << 20) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        m = np.uint64((1 << 21) - 1)
        total = ((z & m) + (z >> np.uint64(21) & m) + (z >> np.uint64(42) & m)).astype(np.int64) - (3 << 20)
        out[a:a + (1 << 20)] = total.astype(np.float32) * np.float32(np.float32(0.04) / np.float32(1 << 21))
    return out


def peer(lib, x, kind, out, seconds):
    """MB of f16 for a second of the clock, and of CPU time; the blocks are left in `out`."""
    length, size = gguf.GGML_QUANT_SIZES[kind]

    def work(counter):
        wide = np.empty(CHUNK, dtype=np.float32)
        while (a := next(counter) * CHUNK) < len(x):
            lib.ggml_fp16_to_fp32_row(x.ctypes.data + 2 * a, wide.ctypes.data, CHUNK)
            lib.ggml_quantize_chunk(kind, wide.ctypes.data, out.ctypes.data + a // length * size, 0, 1, CHUNK, None)

    start, cpu, runs = time.perf_counter(), time.process_time(), 0
    while runs == 0 or time.perf_counter() - start < seconds:
        runs += 1
        counter = itertools.count()
        threads = [threading.Thread(target=work, args=(counter,)) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    megabytes = runs * x.nbytes / 1e6
    return megabytes / (time.perf_counter() - start), megabytes / (time.process_time() - cpu)


def rms(blocks, kind, x):
    part = 1 << 22
    length, size = gguf.GGML_QUANT_SIZES[kind]
    total = 0.0
    for a in range(0, len(x), part):
        b = min(a + part, len(x))
        seen = gguf.quants.dequantize(blocks[a // length * size:b // length * size].reshape(1, -1), kind)
        total += float(np.sum((seen.reshape(-1).astype(np.float64) - x[a:b].astype(np.float64)) ** 2))
    return (total / len(x)) ** 0.5


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--example", type=pathlib.Path, default=ROOT / "target/release/examples/gguf_speed")
    ap.add_argument("--millions", type=int, default=32, help="of 2^20 values")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--seconds", type=int, default=2, help="that each type is made at least, in each round")
    ap.add_argument("--rounds", type=int, default=5)
    args = ap.parse_args()
    lib = load()
    x = values(args.seed, args.millions << 20)
    blocks = {name: np.zeros(len(x) // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1], dtype=np.uint8) for name, kind in TYPES}
    rounds, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            loads.append(round(os.getloadavg()[0], 1))
            theirs = {}
            for name, kind in TYPES:
                theirs[name], theirs[f"{name} cpu"] = peer(lib, x, kind, blocks[name], args.seconds)
            for of in ["", " cpu"]:
                theirs[f"Q4_K_M{of}"] = 1 / (0.834 / theirs[f"Q4_K{of}"] + 0.166 / theirs[f"Q6_K{of}"])
            command = [args.example, str(args.millions), str(args.seed), str(args.seconds), folder]
            ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rounds.append((theirs, ours))
        result = {"llama_cpp_python": llama_cpp.__version__, "gguf": importlib.metadata.version("gguf"), "values": len(x), "seed": args.seed, "load_average": loads}
        for name in ["Q4_0", "Q4_K", "Q6_K", "Q4_K_M"]:
            result[name] = {}
            for of, suffix in [("", ""), (" cpu", "_cpu")]:
                theirs, ours = [r[0][name + of] for r in rounds], [r[1][name + of] for r in rounds]
                if None in ours:
                    continue
                ratios = [o / t for t, o in zip(theirs, ours)]
                result[name] |= {
                    f"llama_cpp{suffix}": [round(v, 1) for v in theirs], f"dsq{suffix}": [round(v, 1) for v in ours],
                    f"ratio_of_medians{suffix}": round(statistics.median(ours) / statistics.median(theirs), 2),
                    f"ratio_least_and_most{suffix}": [round(min(ratios), 2), round(max(ratios), 2)],
                }
        for name, kind in TYPES:
            mine = np.fromfile(pathlib.Path(folder) / name, dtype=np.uint8)
            result[name]["reference"] = [round(r[1][f"{name} reference"], 1) for r in rounds]
            result[name]["bytes_that_differ"] = int(np.count_nonzero(mine != blocks[name]))
            result[name]["rms_error"] = {"llama_cpp": rms(blocks[name], kind, x), "dsq": rms(mine, kind, x)}
    for key, value in result.items():
        print(f"{key}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
