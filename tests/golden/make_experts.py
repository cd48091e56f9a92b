#!/usr/bin/env python3
"""Golden logits and gradients of transformers for models with experts and latent attention: mixtral, deepseek_v2, deepseek_v3.

    pip install -r ../conformance/requirements.txt
    python3 make_experts.py [NAME...]
    (default: all of them)

Everything is seeded and single-threaded. README.md beside this file says what each file holds.
"""

import json
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

from make_architectures import HERE, write_json

BASE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, max_position_embeddings=256,
            bos_token_id=0, eos_token_id=0, hidden_act="silu", tie_word_embeddings=False)
LATENT = dict(BASE, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=64,
              moe_intermediate_size=32, num_key_value_heads=4, rms_norm_eps=1e-5)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
MODELS = {
    "mixtral_tiny": dict(BASE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_key_value_heads=2,
                         intermediate_size=32, num_local_experts=6, num_experts_per_tok=2, rms_norm_eps=1e-5,
                         sliding_window=None, rope_theta=1000000.0),
    # As V2-Lite: queries without a latent, greedy choice of experts, yarn with both magnitudes.
    "deepseek_v2_lite_tiny": dict(LATENT, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", q_lora_rank=None,
                                  n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1,
                                  topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False,
                                  routed_scaling_factor=1.0, rope_theta=10000.0,
                                  rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    # As V2: a latent of queries, experts of the best groups only, other magnitudes.
    "deepseek_v2_tiny": dict(LATENT, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", q_lora_rank=32,
                             v_head_dim=40, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
                             first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                             norm_topk_prob=False, routed_scaling_factor=4.0, rope_theta=10000.0,
                             rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    # As V3 and R1: sigmoid scores with a bias, and a layer that predicts the token after the next.
    "deepseek_v3_tiny": dict(LATENT, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", q_lora_rank=32,
                             n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1,
                             topk_method="noaux_tc", scoring_func="sigmoid", n_group=4, topk_group=2, norm_topk_prob=True,
                             routed_scaling_factor=2.5, num_nextn_predict_layers=1, rope_theta=10000.0,
                             rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
}


def load(folder):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()


def stored(model):
    """The tensors as transformers writes them to files: each expert on its own."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        out = {}
        for path in pathlib.Path(tmp).glob("*.safetensors"):
            out |= load_file(path)
    return out


def margin(model, ids):
    """How far the least of the chosen experts' scores is from the best of the others, over all tokens and layers."""
    seen = []
    hooks = [m.register_forward_hook(lambda _, __, out: seen.append(out)) for n, m in model.named_modules()
             if n.endswith(".gate")]
    model(torch.tensor([ids]))
    [h.remove() for h in hooks]
    gaps = []
    for logits, _, chosen in seen:
        rest = logits.scatter(1, chosen, float("-inf"))
        gaps.append((logits.gather(1, chosen).amin(-1) - rest.amax(-1)).abs().min().item())
    return min(gaps)


def build(seed, name, config):
    from transformers import AutoConfig, AutoModelForCausalLM

    g = torch.Generator().manual_seed(7000 + seed)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config | {"dtype": "float32"})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float()
    for key, p in [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("correction_bias"))]:
        noise = torch.randn(p.shape, generator=g)
        p.data = (1.0 + 0.1 * noise if "norm" in key else noise * 0.5 if "embed" in key
                  else noise * 0.1 if key.endswith("correction_bias") else noise * 0.18)
    state = {k: v.contiguous() for k, v in stored(model).items()}
    if config.get("num_nextn_predict_layers"):
        # Names as in the published files; what they hold is never read.
        last = config["num_hidden_layers"]
        extra = {"embed_tokens.weight": (96, 32), "enorm.weight": (32,), "hnorm.weight": (32,), "eh_proj.weight": (32, 64),
                 "input_layernorm.weight": (32,), "shared_head.norm.weight": (32,), "shared_head.head.weight": (96, 32)}
        state |= {f"model.layers.{last}.{k}": torch.zeros(s) for k, s in extra.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [torch.randint(0, config["vocab_size"], (n,), generator=g).tolist() for n in (17, 61)]
    loaded = load(folder)
    with torch.no_grad():
        out = {f"logits.{i}": loaded(torch.tensor([ids])).logits[0].contiguous() for i, ids in enumerate(prompts)}
        # The two as one batch, the shorter padded on the left: positions are counted from the first token that is not padding.
        pad = [0] * (len(prompts[1]) - len(prompts[0]))
        mask = torch.tensor([[0] * len(pad) + [1] * len(prompts[0]), [1] * len(prompts[1])])
        batch = loaded(torch.tensor([pad + prompts[0], prompts[1]]), attention_mask=mask,
                       position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        padded = max((batch[0, len(pad):] - out["logits.0"]).abs().max().item(), (batch[1] - out["logits.1"]).abs().max().item())
        gap = min(margin(loaded, ids) for ids in prompts)
    tokens = torch.randint(0, config["vocab_size"], (2, 25), generator=g)
    logits = loaded(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
    loss.backward()
    kept = ("layers.1.self_attn.", "gate.weight", "shared_experts", "layers.0.input_layernorm", "layers.0.self_attn.kv_a")
    gradients = {f"grad.{n}": p.grad.clone() for n, p in loaded.named_parameters() if any(k in n for k in kept)}
    with torch.no_grad():
        exact = load(folder).double()
        err = max((exact(torch.tensor([ids])).logits[0].float() - out[f"logits.{i}"]).abs().max().item()
                  for i, ids in enumerate(prompts))
    write_json(folder / "tokens.json", prompts)
    save_file(out, folder / "logits.safetensors")
    save_file(gradients | {"batch": tokens.int(), "loss": loss.detach().reshape(1)}, folder / "gradients.safetensors")
    print(f"{name}: {sorted(k for k in state if 'layers.1' in k and ('experts' not in k or '.0.' in k or 'shared' in k))}")
    print(f"{name}: max |logit| {max(v.abs().max().item() for v in out.values()):.3f}, f32 against f64 {err:.2e}, "
          f"padded batch {padded:.2e}, least gap of router logits {gap:.2e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, (name, config) in enumerate(MODELS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            build(seed, name, config)
