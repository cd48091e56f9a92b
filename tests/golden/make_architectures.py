#!/usr/bin/env python3
"""Golden logits of transformers for the language models beside the plain Llama, and for rotary scaling.

    pip install -r ../conformance/requirements.txt
    python3 make_architectures.py [models] [variants] [rope]
    (default: all of them; variants need the folders that models and make_golden.py llama write)

Everything is seeded and single-threaded. README.md beside this file says what each file holds.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
BASE = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
            vocab_size=128, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0,
            hidden_act="silu", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
MODELS = {
    # Windows in the layers from 1 on, as max_window_layers says.
    "qwen2_tiny": dict(BASE, architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True,
                       use_sliding_window=True, sliding_window=8, max_window_layers=1),
    # A head that is not hidden / heads.
    "qwen3_tiny": dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=False,
                       head_dim=24, attention_bias=False, use_sliding_window=False, sliding_window=None,
                       max_window_layers=3),
    "mistral_tiny": dict(BASE, architectures=["MistralForCausalLM"], model_type="mistral", tie_word_embeddings=False,
                         head_dim=16, sliding_window=8),
    # Every bias that a config can ask for.
    "llama_bias_tiny": dict(BASE, num_hidden_layers=2, architectures=["LlamaForCausalLM"], model_type="llama",
                            tie_word_embeddings=True, head_dim=16, attention_bias=True, mlp_bias=True),
    "qwen3_bias_tiny": dict(BASE, num_hidden_layers=2, architectures=["Qwen3ForCausalLM"], model_type="qwen3",
                            tie_word_embeddings=True, head_dim=16, attention_bias=True, use_sliding_window=False,
                            sliding_window=None, max_window_layers=2),
}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load(folder):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def first_gradients(model, g):
    """Of the mean cross-entropy over next tokens of 2 x 25 tokens: by the attention of layer 1 and what lies below it."""
    batch = torch.randint(0, model.config.vocab_size, (2, 25), generator=g)
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
    loss.backward()
    kept = ("layers.1.self_attn.", "layers.0.self_attn.v_proj", "layers.0.input_layernorm")
    grads = {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters() if any(k in n for k in kept)}
    model.zero_grad()
    return grads | {"batch": batch.int(), "loss": loss.detach().reshape(1)}


def models():
    from transformers import AutoConfig, AutoModelForCausalLM

    for seed, (name, config) in enumerate(MODELS.items()):
        g = torch.Generator().manual_seed(5000 + seed)
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        write_json(folder / "config.json", config | {"dtype": "float32"})
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float()
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            # Large enough that attention is far from uniform, biases matter and the logits are far from zero.
            p.data = (1.0 + 0.1 * noise if "norm" in key else noise * 0.5 if "embed" in key or "bias" in key
                      else noise * 0.18)
        state = {k: v.contiguous() for k, v in model.state_dict().items()
                 if not (config["tie_word_embeddings"] and k == "lm_head.weight")}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        prompts = [torch.randint(0, config["vocab_size"], (n,), generator=g).tolist() for n in (17, 40)]
        loaded = load(folder)
        with torch.no_grad():
            out = {f"logits.{i}": loaded(torch.tensor([ids])).logits[0].contiguous() for i, ids in enumerate(prompts)}
        gradients = first_gradients(loaded, g)
        with torch.no_grad():
            exact = loaded.double()
            err = max((exact(torch.tensor([ids])).logits[0].float() - out[f"logits.{i}"]).abs().max().item()
                      for i, ids in enumerate(prompts))
        write_json(folder / "tokens.json", prompts)
        save_file(out, folder / "logits.safetensors")
        save_file(gradients, folder / "gradients.safetensors")
        print(f"{name}: {sorted(k for k in state if 'layers.0' in k)}")
        print(f"{name}: max |logit| {max(v.abs().max().item() for v in out.values()):.3f}, f32 against f64 {err:.2e}")


# ---------------------------------------------------------------- variants: the weights of one folder, another config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    # Up to max_position_embeddings it changes nothing.
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3,
    "yarn": {"rope_type": "yarn"} | YARN,
    "yarn_betas": {"rope_type": "yarn", "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False} | YARN,
    "yarn_attention_factor": {"rope_type": "yarn", "attention_factor": 0.8} | YARN,
    "yarn_mscales": {"rope_type": "yarn", "mscale": 1.5, "mscale_all_dim": 0.5} | YARN,
    # One of the two says nothing.
    "yarn_mscale": {"rope_type": "yarn", "mscale": 1.5} | YARN,
}


def variants():
    changes = {}
    for i, (name, scaling) in enumerate(SCALINGS.items()):
        base = "llama_tiny" if i % 2 else "llama_tiny_untied"
        theta = 10000.0 if i % 2 else 1000000.0
        new = {"rope_parameters": scaling | {"rope_theta": theta}, "rope_theta": None}
        # The spelling of transformers 4.
        old = {"rope_scaling": scaling, "rope_theta": theta, "rope_parameters": None}
        if name == "linear":
            old["rope_scaling"] = {"type": "linear", "factor": scaling["factor"]}
        changes[name] = (base, old if i % 4 < 2 else new)
    changes |= {
        "qwen2_full": ("qwen2_tiny", {"use_sliding_window": False}),
        "qwen2_layer_types": ("qwen2_tiny", {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        "qwen2_yarn": ("qwen2_tiny", {
            "use_sliding_window": False, "rope_parameters": SCALINGS["yarn"] | {"rope_theta": 10000.0}}),
        "qwen3_window": ("qwen3_tiny", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0}),
        "mistral_full": ("mistral_tiny", {"sliding_window": None}),
        "mistral_wide": ("mistral_tiny", {"sliding_window": 4096}),
        "mistral_one": ("mistral_tiny", {"sliding_window": 1}),
    }
    g = torch.Generator().manual_seed(6000)
    cases, tensors = [], {}
    for name, (base, change) in changes.items():
        config = json.loads((HERE / base / "config.json").read_text())
        for key, value in change.items():
            config[key] = value
            if value is None and key.startswith("rope"):
                del config[key]
        # Beyond the original context of every scaling, and several windows long.
        ids = torch.randint(0, config["vocab_size"], (150,), generator=g)
        rows = [*range(0, 150, 11), 149]
        with tempfile.TemporaryDirectory() as tmp:
            shutil.copy(HERE / base / "model.safetensors", tmp)
            write_json(pathlib.Path(tmp) / "config.json", config)
            model = load(tmp)
            with torch.no_grad():
                logits = model(ids[None]).logits[0]
                err = (model.double()(ids[None]).logits[0].float() - logits).abs().max().item()
        tensors[name] = logits[rows].contiguous()
        cases.append({"name": name, "base": base, "config": config, "tokens": ids.tolist(), "rows": rows})
        print(f"{name}: max |logit| {logits.abs().max().item():.3f}, f32 against f64 {err:.2e}")
    (HERE / "variants.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    save_file(tensors, HERE / "variants.safetensors")


# ---------------------------------------------------------------- rope: frequencies and attention factors

def rope():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cases = []
    for scaling in SCALINGS.values():
        for head_dim, theta, factor, context in ((8, 10000.0, 8.0, 64), (64, 10000.0, 2.0, 2048), (128, 1000000.0, 4.0, 32768),
                                                 (128, 500000.0, 32.0, 8192), (6, 500.0, 1.0, 16)):
            keys = scaling | {"factor": factor}
            if "original_max_position_embeddings" in keys:
                keys["original_max_position_embeddings"] = context
            config = LlamaConfig(head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4,
                                 max_position_embeddings=context * 4, rope_parameters=keys | {"rope_theta": theta})
            frequencies, attention = ROPE_INIT_FUNCTIONS[keys["rope_type"]](config)
            cases.append({"head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": context * 4,
                          "rope_scaling": keys, "frequencies": frequencies.tolist(), "attention_factor": attention})
    (HERE / "rope.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    print(f"rope: {len(cases)} cases")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for part in sys.argv[1:] or ("models", "variants", "rope"):
        {"models": models, "variants": variants, "rope": rope}[part]()
