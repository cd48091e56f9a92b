#!/usr/bin/env python3
"""Time of the plain GPTQ algorithm (Frantar et al., arXiv:2210.17323) in torch for one layer: Hessian in f32, Cholesky of its
inverse, columns in blocks of 128. The peer of `cargo run --release -p dsq-train --example gptq_speed`; same arguments.

    python3 bench_gptq.py [N K TOKENS GROUP]
"""

import sys
import time

import torch

torch.manual_seed(0)
torch.set_num_threads(2)
n, k, tokens, group = (list(map(int, sys.argv[1:])) + [4096, 4096, 65536, 128][len(sys.argv) - 1:])
w, x = torch.randn(n, k), torch.randn(2048, k)

clock = time.time()
h = torch.zeros(k, k)
for _ in range(-(-tokens // 2048)):
    h.addmm_(x.t(), x)
hessian = time.time() - clock

clock = time.time()
h += 0.01 * h.diagonal().mean() * torch.eye(k)
u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
factored = time.time() - clock

clock = time.time()
scale = w.reshape(n, k // group, group).abs().amax(-1) / 7.5
q, target = torch.zeros_like(w), w.clone()
for i in range(0, k, 128):
    end = min(i + 128, k)
    block, errors = target[:, i:end].clone(), torch.zeros(n, end - i)
    for j in range(end - i):
        s = scale[:, (i + j) // group]
        code = torch.clamp(torch.round(block[:, j] / s), -8, 7) * s
        q[:, i + j] = code
        errors[:, j] = (block[:, j] - code) / u[i + j, i + j]
        block[:, j:] -= errors[:, j:j + 1] @ u[i + j:i + j + 1, i + j:end]
    target[:, end:] -= errors @ u[i:end, end:]
columns = time.time() - clock
print(f"torch {torch.__version__}: Hessian {hessian:.1f} s, Cholesky {factored:.1f} s, columns {columns:.1f} s, "
      f"together {hessian + factored + columns:.1f} s")
