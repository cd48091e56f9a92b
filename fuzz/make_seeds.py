"""Small files for the fuzz targets to start from, into seeds/ (committed). Usage: python make_corpus.py DSQ [EFFICIENTNET.pth]

DSQ is the built binary. Needs numpy, torch and tokenizers (any recent versions: only the forms of the files matter).
"""

import gzip
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

HERE = pathlib.Path(__file__).resolve().parent / "seeds"
DSQ = str(pathlib.Path(sys.argv[1]).resolve())


def put(target, name, data):
    folder = HERE / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def safetensors(tensors):
    header, blob = {}, b""
    for name, (dtype, array) in tensors.items():
        data = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + blob


def tiny_llama(width=32, vocab=40):
    rng = np.random.default_rng(1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": width,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0,
        "bos_token_id": 0, "eos_token_id": 1,
    }
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width),
              "self_attn.o_proj": (width, width), "mlp.gate_proj": (width, width), "mlp.up_proj": (width, width),
              "mlp.down_proj": (width, width)}
    weight = lambda *shape: ("F32", rng.normal(0, 0.1, shape).astype("<f4"))  # noqa: E731
    tensors = {"model.embed_tokens.weight": weight(vocab, width), "model.norm.weight": ("F32", np.ones(width, "<f4"))}
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = weight(*shape)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{norm}.weight"] = ("F32", np.ones(width, "<f4"))
    return config, tensors


def tokenizers_():
    vocab = {c: i for i, c in enumerate(["<s>", "</s>"] + sorted(pre_tokenizers.ByteLevel.alphabet())[:28] + ["ab", "abc"])}
    merges = [("a", "b"), ("ab", "c")]
    for c in "abc":
        vocab.setdefault(c, len(vocab))
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(r"\s?\w+", "isolated"), pre_tokenizers.ByteLevel(use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    put("tokenizer", "bpe-split", bpe.to_str())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    put("tokenizer", "bpe", bpe.to_str())
    word = Tokenizer(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
    word.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    word.decoder = decoders.WordPiece()
    put("tokenizer", "wordpiece", word.to_str())
    uni = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581he", -1.0), ("l", -2.0), ("o", -2.5)], unk_id=0, byte_fallback=False))
    uni.pre_tokenizer = pre_tokenizers.Metaspace()
    uni.decoder = decoders.Metaspace()
    put("tokenizer", "unigram", uni.to_str())
    return bpe.to_str()


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    text = tokenizers_()
    put("safetensors", "types", safetensors({
        t: (t, np.zeros((2, 3), d)) for t, d in
        [("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2"), ("F8_E4M3", "u1"), ("F8_E5M2", "u1"), ("I64", "<i8"), ("U8", "u1"), ("BOOL", "u1")]}))
    put("safetensors", "scalar", safetensors({"s": ("F32", np.float32(1).reshape(())), "none": ("I32", np.zeros((0, 4), "<i4"))}))
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        config, tensors = tiny_llama()

        def folder(name, config, tensors):
            (tmp / name).mkdir()
            (tmp / name / "config.json").write_text(json.dumps(config))
            (tmp / name / "model.safetensors").write_bytes(safetensors(tensors))
            (tmp / name / "tokenizer.json").write_text(text)
            return tmp / name
        source = folder("float", config, tensors)

        def run(*args):
            done = subprocess.run([DSQ, *args], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"dsq {args[0]}: {done.stderr}")

        seeds = {"float": source}
        schemes = [["W4A16", "--group-size", "16"], ["W4A16", "--asymmetric", "--group-size", "32"], ["W8A8"], ["FP8_DYNAMIC"], ["NVFP4A16"], ["MXFP4A16"]]
        for i, scheme in enumerate(schemes):
            out = tmp / f"packed{i}"
            run("quantize", source, "--out", out, "--scheme", *scheme)
            seeds[f"ct-{scheme[0]}-{i}"] = out
        run("quantize", source, "--out", tmp / "f16", "--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16")
        for form, more in [("gptq", []), ("gptq", ["--gptq-version", "v2"]), ("awq", [])]:
            out = tmp / f"{form}{len(more)}"
            run("export", tmp / "f16", "--out", out, "--format", form, *more)
            seeds[f"{form}{len(more)}"] = out
        for name, at in seeds.items():
            one = (at / "config.json").read_bytes()
            put("config", name, json.dumps(json.loads(one), separators=(",", ":")))
            put("folder", name, json.dumps(json.loads(one), separators=(",", ":")).encode() + b"\0" + (at / "model.safetensors").read_bytes())
        for ty in ("F16", "Q8_0", "Q4_0", "Q4_1"):
            out = tmp / f"{ty}.gguf"
            run("export", source, "--out", out, "--format", "gguf", "--gguf-type", ty)
            put("gguf", ty, out.read_bytes())
        state = {"a.weight": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.float16), "n": torch.tensor(3)}
        for name, zipped in [("zip", True), ("legacy", False)]:
            torch.save(state, tmp / name, _use_new_zipfile_serialization=zipped)
            put("pytorch", name, (tmp / name).read_bytes())
    for arch, more in [("qwen2", {"sliding_window": None}), ("qwen3", {"head_dim": 16}), ("mistral", {"sliding_window": 8})]:
        put("config", arch, json.dumps({**config, "model_type": arch, "architectures": [arch.title() + "ForCausalLM"], **more}))
    for kind, more in [("linear", {"factor": 2.0}), ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
                       ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16})]:
        put("config", kind, json.dumps({**config, "rope_scaling": {"rope_type": kind, **more}}))
    put("config", "resnet", json.dumps({"model_type": "resnet", "architectures": ["ResNet"], "channels": [8, 16], "blocks_per_stage": 1, "num_classes": 10}))
    header = {"format": 1, "dsq": "0", "of": {"model_sha256": "m", "tokens_sha256": "t", "context": 4, "stride": 4, "vocab": 20}}
    pairs = b"".join(struct.pack("<If", i % 20, -0.5 * (i % 20)) for i in range(65))
    row = zlib.compress(struct.pack("<f", 0.0) + pairs + bytes(64 * i % 256 for i in range(20)) + bytes(i // 4 for i in range(20)), 1)
    put("logits", "two_rows", json.dumps(header).encode() + b"\n" + 2 * (struct.pack("<I", len(row)) + row))
    for name in ["choice", "partial", "predict"]:
        lines = (HERE.parents[1] / "tests/golden/tasks" / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        put("tasks", name, b"".join(lines[:4]))
    put("tasks", "gzip", gzip.compress(b"".join(lines[:2]), mtime=0))
    put("chat_template", "chatml", "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    put("chat_template", "checks", "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ eos_token }}{% endfor %}")
    put("chat_template", "namespace", "{% set ns = namespace(n=0) %}{% set ns.n = [ns] %}{{ ns.n }}")
    put("chat_template", "macro", "{% macro f(x) %}{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ x | tojson }}{% endmacro %}{{ f(messages) }}{{ strftime_now('%Y') if strftime_now is defined else 'no' }}")


main()
