#!/usr/bin/env python3
"""What llama.cpp's own quantizer makes of a small model, tensor by tensor: type and SHA-256 of the bytes, into llama_cpp.json.

The weights come from a linear congruential generator, which the test that reads the file runs too (crates/dsq-checkpoint/tests/
gguf_export.rs); they are written as an F32 GGUF file by PyPI `gguf`, query and key rows permuted as convert_hf_to_gguf.py does.
Needs gguf 0.19.0 and llama-cpp-python 0.3.36.
"""

import ctypes
import hashlib
import json
import pathlib
import tempfile

import gguf
import llama_cpp
import numpy as np

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 256, 4, 2, 288, 96, 8
TYPES = {"F32": 0, "BF16": 32, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15}


@llama_cpp.llama_log_callback
def silent(*_):
    pass


def uniform():
    s = 1
    while True:
        s = (s * 1_664_525 + 1_013_904_223) % 2**32
        yield (s >> 8) / 2**24 - 0.5


def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def write(path):
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(64)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_vocab_size(VOCAB)
    out.add_tokenizer_model("none")
    u = uniform()

    def values(*shape):
        n = int(np.prod(shape))
        return np.array([next(u) for _ in range(n)], dtype=np.float64).reshape(shape)

    def matrix(name, n, k, heads=None):
        w = (values(n, k) * 0.125).astype(np.float32)
        out.add_tensor(name, permute(w, heads) if heads else w)

    def norm(name):
        out.add_tensor(name, (1 + values(HIDDEN) * 0.125).astype(np.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    matrix("token_embd.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN, HEADS)
        matrix(f"blk.{i}.attn_k.weight", kv, HIDDEN, KV_HEADS)
        matrix(f"blk.{i}.attn_v.weight", kv, HIDDEN)
        matrix(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        matrix(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        matrix(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
    norm("output_norm.weight")
    matrix("output.weight", VOCAB, HIDDEN)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "f32.gguf")
        write(source)
        for name, ftype in TYPES.items():
            target = pathlib.Path(folder, f"{name}.gguf")
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = ftype, 2
            assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0
            golden[name] = {
                t.name: f"{t.tensor_type.name} {hashlib.sha256(t.data.tobytes()).hexdigest()[:16]}"
                for t in gguf.GGUFReader(target).tensors
            }
    lines = [f' "{kind}": {{\n  ' + ",\n  ".join(f'"{n}": "{v}"' for n, v in t.items()) + "\n }" for kind, t in golden.items()]
    pathlib.Path(__file__).with_name("llama_cpp.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
