"""ResNet and MobileNetV2 of transformers and torchvision, with random weights, against dsq's runtime and onnxruntime. run.py calls these;
EfficientNet-Lite0, which has trained weights, is in run.py and onnx_checks.py."""

import numpy as np

import onnx_checks

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLASSES = 100
# What is built: the class of transformers, and its config. The first five are of published shapes; the others are what is quantized.
MODELS = {
    "resnet-18": ("ResNet", dict(layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2])),
    "resnet-34": ("ResNet", dict(layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3])),
    "resnet-50": ("ResNet", dict()),
    "mobilenet-same": ("MobileNetV2", dict()),
    "mobilenet-half-0.75": ("MobileNetV2", dict(depth_multiplier=0.75, tf_padding=False, layer_norm_eps=1e-5)),
    "basic": ("ResNet", dict(layer_type="basic", embedding_size=16, hidden_sizes=[16, 32, 64, 96], depths=[1, 2, 1, 1])),
    "bottleneck": ("ResNet", dict(embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 1, 1])),
    "mobilenet": ("MobileNetV2", dict(depth_multiplier=0.35, finegrained_output=False)),
}
QUANTIZED = ("basic", "bottleneck", "mobilenet")
# Names of torchvision's and timm's functions.
FILES = ("torchvision resnet18", "torchvision resnet50", "torchvision mobilenet_v2", "timm resnet18", "timm mobilenetv2_100")


def randomize(model):
    """Batch norms and weights with which signals neither die nor grow."""
    import torch
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(m.weight, 0.5, 1.0)
            torch.nn.init.uniform_(m.bias, -0.2, 0.4)
            torch.nn.init.uniform_(m.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(m.running_var, 0.5, 1.5)
        if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear)):
            torch.nn.init.kaiming_normal_(m.weight)
    return model.eval()


def build(ctx, name):
    """A folder of transformers and its model."""
    import torch
    import transformers
    family, settings = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{family}Config")(**settings, num_labels=CLASSES)
    model = randomize(getattr(transformers, f"{family}ForImageClassification")(config))
    folder = ctx.work / f"image-{name}"
    if not folder.exists():
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(PREPARATION)
    return folder, model


PREPARATION = """{"image_processor_type": "BitImageProcessor", "do_resize": true, "size": {"shortest_edge": 256}, "resample": 2,
"do_center_crop": true, "crop_size": {"height": 224, "width": 224}, "do_rescale": true, "do_normalize": true,
"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}"""


def inputs(folder):
    """The pictures of a folder as that says, by Pillow."""
    from PIL import Image
    pictures = []
    for path in sorted(folder.glob("*.jpg")):
        picture = Image.open(path).convert("RGB")
        size = [256 * n // min(picture.size) for n in picture.size]
        left, top = (round((n - 224) / 2) for n in size)
        picture = picture.resize(size, Image.BILINEAR).crop((left, top, left + 224, top + 224))
        pictures.append(((np.asarray(picture, np.float32) / 255 - MEAN) / STD).transpose(2, 0, 1))
    return np.stack(pictures).astype(np.float32)


def same_logits(ctx, expect, path, model, x):
    import torch
    out = model(torch.from_numpy(x))
    theirs = getattr(out, "logits", out).numpy()
    ours = onnx_checks.image_logits(ctx, ctx.images, path, x)
    worst, same = onnx_checks.difference([ours], [theirs]), int((ours.argmax(1) == theirs.argmax(1)).sum())
    return expect(worst <= 1e-4 and same == len(x), f"max |difference| / max |logit| {worst:.1e} (bound 1e-4), same class {same}/{len(x)}")


def float_logits(ctx, expect, name):
    _, pictures = ctx.need_lite0()
    folder, model = build(ctx, name)
    return same_logits(ctx, expect, folder, model, inputs(pictures)[:4])


def file_logits(ctx, expect, skipped, name):
    """The state dict of a model of torchvision or timm, and the folder of transformers that dsq makes of it."""
    import importlib
    import torch
    import transformers
    _, pictures = ctx.need_lite0()
    package, function = name.split()
    try:
        module = importlib.import_module("torchvision.models" if package == "torchvision" else "timm.models")
    except ImportError:
        raise skipped(f"needs {package}")
    torch.manual_seed(len(name))
    model, path = randomize(getattr(module, function)()), ctx.work / f"{name.replace(' ', '-')}.pth"
    torch.save(model.state_dict(), path)
    x = inputs(pictures)[:4]
    figure = same_logits(ctx, expect, path, model, x)
    folder = ctx.work / f"{path.stem}-folder"
    ctx.dsq("export", path, "--out", folder, "--format", "safetensors")
    path.unlink()
    loaded = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    worst = onnx_checks.difference([loaded(torch.from_numpy(x)).logits.numpy()], [model(torch.from_numpy(x)).numpy()])
    return expect(worst <= 1e-5, f"{figure}; transformers loads the exported folder: {worst:.1e} (bound 1e-5)")


def onnx(ctx, expect, name, quantized=None):
    ctx.need_onnx()
    _, pictures = ctx.need_lite0()
    (folder, _), x = build(ctx, name), inputs(pictures)
    out = ctx.work / f"onnx-{name}-{quantized or 'float'}.onnx"
    if quantized is None:
        return onnx_checks.image_float(ctx, expect, ctx.images, folder, x, out)
    flags = ["--calib", pictures, *onnx_checks.IMAGE_EXPORTS[quantized]]
    packed = ctx.dsq.quantize(folder, f"onnx-{name}-{quantized}", flags)
    return onnx_checks.image_difference(ctx, expect, ctx.images, packed, folder, x, out)


def checks(expect, skipped):
    for name in MODELS:
        yield f"image-logits {name}", lambda ctx, n=name: float_logits(ctx, expect, n)
    for name in FILES:
        yield f"image-files {name}", lambda ctx, n=name: file_logits(ctx, expect, skipped, n)
    for name in QUANTIZED:
        for how in (None, *onnx_checks.IMAGE_EXPORTS):
            yield f"onnx-images {name} {how or 'float'}", lambda ctx, n=name, q=how: onnx(ctx, expect, n, q)
