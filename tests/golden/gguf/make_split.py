"""One small model as one file and in three parts, the first without tensors, by gguf's own writer. See README.md.

Usage: python make_split.py
"""

import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = pathlib.Path(__file__).parent
TOKENS = ["<s>", "</s>", "Ġ", "Ċ", ".", "th", *"abcdefghijklmnopqrstuvwxyz"]


def write(path, **split):
    rng = np.random.default_rng(13)
    d, ffn, heads, kv = 32, 64, 4, 2
    w = gguf.GGUFWriter(path, "llama", **split)
    w.add_name("split")
    w.add_block_count(1)
    w.add_context_length(128)
    w.add_embedding_length(d)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(d // heads)
    w.add_vocab_size(len(TOKENS))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    w.add_token_merges(["t h"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    w.add_quantization_version(2)

    def matrix(name, rows, cols, ty=T.Q8_0):
        x = rng.standard_normal((rows, cols)).astype(np.float32) * 0.2
        w.add_tensor(name, gguf.quantize(x, ty), raw_dtype=ty)

    def norm(name):
        w.add_tensor(name, (1 + 0.1 * rng.standard_normal(d)).astype(np.float32))

    matrix("token_embd.weight", len(TOKENS), d)
    norm("output_norm.weight")
    norm("blk.0.attn_norm.weight")
    matrix("blk.0.attn_q.weight", d, d)
    matrix("blk.0.attn_k.weight", kv * d // heads, d, T.Q5_0)
    matrix("blk.0.attn_v.weight", kv * d // heads, d)
    matrix("blk.0.attn_output.weight", d, d, T.F16)
    norm("blk.0.ffn_norm.weight")
    matrix("blk.0.ffn_gate.weight", ffn, d, T.Q4_0)
    matrix("blk.0.ffn_up.weight", ffn, d)
    matrix("blk.0.ffn_down.weight", d, ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


write(HERE / "whole.gguf")
write(HERE / "split.gguf", split_max_tensors=6, small_first_shard=True)
