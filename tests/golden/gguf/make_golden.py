"""Golden vectors for the GGUF reader: what PyPI `gguf` and `transformers` make of the same bytes. See README.md.

Usage: python make_golden.py [SMOLLM2.gguf]   (without the argument smollm2.json is left as it is)
"""

import hashlib
import json
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
TYPES = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
# Where the f16 scales (and minima) lie in a block.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def random_blocks(rng, ty, n):
    """n blocks of random bytes: every code, scale byte and sign, with finite f16 scales from subnormal to large."""
    size = gguf.GGML_QUANT_SIZES[ty][1]
    if ty == T.F32:
        return rng.standard_normal(n).astype("<f4").view(np.uint8).reshape(n, size)
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    if ty in (T.F16, T.BF16):
        # Keep infinities and NaN out; they are refused by the reader.
        exponent = {T.F16: 0x7C00, T.BF16: 0x7F80}[ty]
        words = blocks.view("<u2").reshape(-1)
        words[(words & exponent) == exponent] &= 0x80FF
        return words.view(np.uint8).reshape(n, size)
    for at in HALVES[ty]:
        d = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 2, n)).astype("<f2")
        blocks[:, at : at + 2] = d.view(np.uint8).reshape(n, 2)
    return blocks


def blocks():
    rng, out = np.random.default_rng(11), {}
    for ty in TYPES:
        values, _ = gguf.GGML_QUANT_SIZES[ty]
        data = random_blocks(rng, ty, {1: 256, 32: 16, 256: 4}[values])
        decoded = gguf.dequantize(data.reshape(1, -1), ty).astype("<f4")
        out[ty.name] = {"bytes": data.tobytes().hex(), "values": decoded.tobytes().hex()}
    (HERE / "blocks.json").write_text(json.dumps(out, indent=0) + "\n")


def tiny():
    """A two-layer model, 8 query and 2 kv heads of width 8, written by gguf's own writer in types of every kind."""
    rng = np.random.default_rng(12)
    d, ffn, layers, heads, kv, vocab = 64, 96, 2, 8, 2, 40
    w = gguf.GGUFWriter(HERE / "tiny.gguf", "llama")
    w.add_block_count(layers)
    w.add_context_length(128)
    w.add_embedding_length(d)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(50000.0)
    w.add_rope_dimension_count(d // heads)
    w.add_vocab_size(vocab)
    w.add_quantization_version(2)
    types = [T.Q8_0, T.Q5_1, T.Q4_0, T.Q5_0, T.Q4_1, T.BF16, T.F16, T.F32]
    turn = 0

    def matrix(name, rows, cols):
        nonlocal turn
        ty = types[turn % len(types)]
        turn += 1
        x = (rng.standard_normal((rows, cols)) * 0.1).astype(np.float32)
        w.add_tensor(name, x if ty == T.F32 else gguf.quantize(x, ty), raw_dtype=ty)

    def norm(name):
        w.add_tensor(name, (1 + 0.1 * rng.standard_normal(d)).astype(np.float32))

    matrix("token_embd.weight", vocab, d)
    norm("output_norm.weight")
    matrix("output.weight", vocab, d)
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", d, d)
        matrix(f"blk.{i}.attn_k.weight", kv * d // heads, d)
        matrix(f"blk.{i}.attn_v.weight", kv * d // heads, d)
        matrix(f"blk.{i}.attn_output.weight", d, d)
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", ffn, d)
        matrix(f"blk.{i}.ffn_up.weight", ffn, d)
        matrix(f"blk.{i}.ffn_down.weight", d, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def tensors_of(path):
    """SHA-256 of every f32 tensor (little-endian, row major) that transformers makes of a GGUF file."""
    path = pathlib.Path(path).resolve()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {
        name: {"shape": list(x.shape), "sha256": hashlib.sha256(x.contiguous().numpy().astype("<f4").tobytes()).hexdigest()}
        for name, x in sorted(state.items())
    }


def write_tensors(name, path):
    versions = {"gguf": "0.19.0", "transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    file = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    out = {"versions": versions, "file_sha256": file, "tensors": tensors_of(path)}
    (HERE / name).write_text(json.dumps(out, indent=0) + "\n")


blocks()
tiny()
write_tensors("tiny.json", HERE / "tiny.gguf")
if len(sys.argv) > 1:
    write_tensors("smollm2.json", sys.argv[1])
