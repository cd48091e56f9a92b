"""Golden vectors for GPTQ and AWQ layers: the words that GPTQModel and AutoAWQ pack, and the values that they unpack.

Usage: python make_golden.py FOLDER   (with gptqmodel-7.7.0.tar.gz and autoawq-0.2.9.tar.gz, as `pip download --no-deps` fetches them)
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "conformance"))
from column_peers import Peers  # noqa: E402

N, K = 32, 64
CASES = [
    {"name": f"gptq{v}-w{bits}-{'sym' if sym else 'asym'}-g{g}" + ("-order" if order else ""), "version": v, "bits": bits,
     "sym": sym, "group_size": g, "order": order}
    for v in (1, 2) for bits in (2, 3, 4, 8) for sym in (True, False) for g in (32, -1) for order in (False, True)
    if not (order and (g == -1 or bits == 3)) and not (g == -1 and bits in (2, 3))
] + [{"name": f"awq-g{g}", "version": 0, "bits": 4, "sym": False, "group_size": g, "order": False} for g in (32, -1)]


def main():
    peers = Peers(sys.argv[1])
    tensors = {}
    torch.manual_seed(16)
    for case in CASES:
        bits, g = case["bits"], case["group_size"]
        groups = 1 if g == -1 else K // g
        codes = torch.randint(0, 2**bits, (N, K))
        scales = (torch.rand(N, groups) * 0.02 + 0.001).half()
        # Version 1 has no zero point of 0.
        zeros = torch.full((N, groups), 2 ** (bits - 1)) if case["sym"] else torch.randint(1, 2**bits, (N, groups))
        g_idx = (torch.arange(K) // (K // groups)).int()
        if case["order"]:
            g_idx = g_idx[torch.randperm(K)]
        if case["version"]:
            packed = peers.gptq_pack(bits, codes, scales, zeros, g_idx, case["version"])
            values = peers.gptq_values(bits, packed, case["version"])
        else:
            packed = peers.awq_pack(codes, scales, zeros)
            values = peers.awq_values(packed)
        want = (codes - zeros[:, g_idx.long()]).float() * scales.float()[:, g_idx.long()]
        assert torch.equal(values, want), case["name"]
        for part, tensor in packed.items():
            tensors[f"{case['name']}.{part}"] = tensor.contiguous()
        tensors[f"{case['name']}.codes"] = (codes - 2 ** (bits - 1)).to(torch.int8)
        tensors[f"{case['name']}.zeros"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
    save_file(tensors, HERE / "layers.safetensors")
    (HERE / "layers.json").write_text(json.dumps({"shape": [N, K], "cases": CASES}, indent=0) + "\n")


main()
