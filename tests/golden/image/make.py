#!/usr/bin/env python3
"""Golden logits of transformers and torchvision for small image models with random weights, and pixels of a picture.

    pip install -r ../../conformance/requirements.txt torchvision pillow
    python3 make.py            # writes the folders and files beside this script

Everything is seeded and single-threaded. ../README.md says what each file holds.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.transforms import InterpolationMode, functional
from transformers import (BitImageProcessor, MobileNetV2Config, MobileNetV2ForImageClassification, ResNetConfig,
                          ResNetForImageClassification)

HERE = pathlib.Path(__file__).resolve().parent
SIZE = (33, 47)
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
LABELS = {i: name for i, name in enumerate(["tench", "cock", "hen", "owl", "newt", "frog", "eft"])}
RESNET = dict(embedding_size=6, hidden_sizes=[8, 12, 16], depths=[1, 2, 1], id2label=LABELS)
MOBILENET = dict(depth_multiplier=0.11, depth_divisible_by=2, min_depth=4, finegrained_output=False, num_labels=7,
                 image_size=list(SIZE))
FOLDERS = {
    "resnet_basic": ResNetConfig(**RESNET, layer_type="basic"),
    "resnet_bottleneck": ResNetConfig(**RESNET, layer_type="bottleneck"),
    "resnet_bottleneck_first": ResNetConfig(**RESNET, layer_type="bottleneck", downsample_in_first_stage=True,
                                            downsample_in_bottleneck=True),
    "mobilenet_same": MobileNetV2Config(**MOBILENET, expand_ratio=3.0, first_layer_is_expansion=False),
    "mobilenet_half": MobileNetV2Config(**MOBILENET, tf_padding=False, hidden_act="relu", layer_norm_eps=1e-5,
                                        expand_ratio=3.0),
}


class SmallResNet(ResNet):
    """torchvision's, with a sixteenth of its channels."""

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        if planes == 64:
            self.inplanes = 4
        return super()._make_layer(block, planes // 16, blocks, stride, dilate)

    def __init__(self, block, depths):
        super().__init__(block, depths)
        self.conv1 = torch.nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(32 * block.expansion, 7)


FILES = {
    "torchvision_resnet_basic": lambda: SmallResNet(BasicBlock, [2, 1, 1, 1]),
    "torchvision_resnet_bottleneck": lambda: SmallResNet(Bottleneck, [1, 2, 1, 1]),
}


def randomize(model):
    """Batch norms of a trained network, more or less; rounded to f16, so that a file may hold that."""
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(m.weight, 0.7, 1.3)
            torch.nn.init.uniform_(m.bias, -0.2, 0.4)
            torch.nn.init.uniform_(m.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(m.running_var, 0.5, 1.5)
        if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear)):
            torch.nn.init.kaiming_normal_(m.weight)
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            if t.is_floating_point():
                t.copy_(t.half().float())
    return model.eval()


def inputs(size):
    """Pixel p of 2 * height * width * 3 (pictures, rows, columns, colours) is p * 7919 mod 251."""
    h, w = size
    pixels = (torch.arange(2 * h * w * 3, dtype=torch.int64) * 7919 % 251).view(2, h, w, 3).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def golden(model, stem, size, path):
    """Logits of an f64 pass, what the f32 pass is off by, and the gradient of the sum of the squares of the logits for the first
    convolution."""
    x = inputs(size)
    logits = lambda m, x: getattr(out := m(x), "logits", out)  # noqa: E731
    with torch.no_grad():
        single = logits(model, x)
    double = logits(model.double(), x.double())
    weight = dict(model.named_parameters())[stem]
    gradient, = torch.autograd.grad(double.square().sum(), weight)
    error = (single.double() - double).abs().max()
    save_file({"logits": double.detach().float().contiguous(), "float32_error": error.detach().float().view(1),
               "stem_gradient": gradient.float().contiguous()}, path)


def main():
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(FOLDERS.items()):
        torch.manual_seed(seed)
        resnet = isinstance(config, ResNetConfig)
        model = randomize((ResNetForImageClassification if resnet else MobileNetV2ForImageClassification)(config))
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.half().save_pretrained(folder)
        model.float()
        BitImageProcessor(size={"shortest_edge": 48}, crop_size={"height": SIZE[0], "width": SIZE[1]}, resample=2,
                          image_mean=MEAN, image_std=STD).save_pretrained(folder)
        stem = "resnet.embedder.embedder" if resnet else "mobilenet_v2.conv_stem.first_conv"
        golden(model, f"{stem}.convolution.weight", SIZE, folder / "golden.safetensors")
    for seed, (name, make) in enumerate(FILES.items()):
        torch.manual_seed(100 + seed)
        model = randomize(make())
        state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
        # Both formats of such files; the old one is the smaller.
        torch.save(state, HERE / f"{name}.pth", _use_new_zipfile_serialization="basic" in name)
        # The size that torchvision's models are given.
        golden(model, "conv1.weight", (224, 224), HERE / f"{name}.safetensors")
    pictures()


def pictures():
    """A JPEG picture, and what torchvision makes of it (Pillow's filters)."""
    y, x = np.mgrid[0:90, 0:131]
    waves = np.stack([np.sin(x / 7 + y / 11), np.cos(x / 13 - y / 5), np.sin((x - 60) * (y - 40) / 900)], -1)
    picture = Image.fromarray((127.5 + 120 * waves).astype(np.uint8))
    picture.save(HERE / "picture.jpg", quality=90)
    picture = Image.open(HERE / "picture.jpg").convert("RGB")
    kept = {}
    for name, size, crop, mode in [("shorter_48", 48, SIZE, InterpolationMode.BILINEAR),
                                   ("stretched_40_50", (40, 50), (40, 50), InterpolationMode.BICUBIC),
                                   ("larger_100", 100, (51, 60), InterpolationMode.BILINEAR)]:
        out = functional.center_crop(functional.resize(picture, size, mode), crop)
        kept[name] = torch.from_numpy(np.asarray(out).copy())
    save_file(kept, HERE / "picture.safetensors")


if __name__ == "__main__":
    print(torch.__version__, torchvision.__version__)
    main()
    sizes = {p.name: p.stat().st_size for p in sorted(HERE.rglob("*")) if p.is_file()}
    print(json.dumps(sizes, indent=1), sum(sizes.values()))
