#!/usr/bin/env python3
"""What torchao's fake quantization adds to a training step of a small Llama in torch, on the CPU and in f32. The peer of `dsq bench
recipes/tiny-llama-w4a16.toml --train-steps N` with the settings in docs/results.md ("GPTQ of one layer, and fake quantization
in a training step"); the same sizes by default, and the same parts in a step: forward, backward, clipping, AdamW. Not a
training: tokens are random.

Float and QAT steps alternate in one process, on two copies of one model, and change who goes first; the overhead is the
median over pairs of QAT time / float time. The linears of the layers are fake quantized, the (tied) head is not, as in dsq.
Prints JSON.

    python3 bench_torchao.py [--steps 25]        needs torch and torchao
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time

import torch
import torchao
from torch import nn
from torch.nn import functional as F
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

WARM_UP = 2


class Block(nn.Module):
    def __init__(self, d, inner, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, d, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))

        def turned(y):
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, vocab, d, inner, layers, heads, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Block(d, inner, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        size = d // heads
        frequency = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angle = torch.outer(torch.arange(context).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids):
        x, t = self.embed(ids), ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return F.linear(self.norm(x), self.embed.weight)


def prepared(model, activations):
    """A copy with torchao's fake quantization: weights symmetric INT4 in groups of 32, inputs asymmetric INT8 per token
    (torchao has no symmetric ones) or float."""
    weight = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=True)
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if activations else None
    out = copy.deepcopy(model)
    quantize_(out, QATConfig(activation_config=inputs, weight_config=weight, step="prepare"))
    assert sum(type(m).__name__ == "FakeQuantizedLinear" for m in out.modules()) == 7 * len(model.layers)
    return out


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(steps=25, threads=2, vocab=1024, d=256, inner=704, layers=4, heads=4, batch=16, length=128)
    for name, default in sizes.items():
        arguments.add_argument(f"--{name}", type=int, default=default)
    a = arguments.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = Llama(a.vocab, a.d, a.inner, a.layers, a.heads, a.length)
    batches = torch.randint(a.vocab, (WARM_UP + a.steps, a.batch, a.length + 1))

    def stepper(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

        def step(ids):
            clock = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, a.vocab), ids[:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return time.perf_counter() - clock, loss.item()

        return step

    rows = []
    for name, activations in [("W4A16, group 32", False), ("W4A8, group 32, INT8 per token", True)]:
        steps = [stepper(copy.deepcopy(model)), stepper(prepared(model, activations))]
        times, losses = [[], []], [0.0, 0.0]
        for i, ids in enumerate(batches):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                seconds, losses[which] = steps[which](ids)
                if i >= WARM_UP:
                    times[which].append(1e3 * seconds)
        rows.append({
            "name": name,
            "float_step_ms": statistics.median(times[0]),
            "step_ms": statistics.median(times[1]),
            "fake_quant_overhead": statistics.median(q / f for f, q in zip(*times)),
            "last_loss_float": losses[0],
            "last_loss": losses[1],
        })
    print(json.dumps({
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": a.batch * a.length,
        **vars(a),
        "rows": rows,
    }, indent=1))


main()
