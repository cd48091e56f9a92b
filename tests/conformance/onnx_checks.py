"""Checks of `dsq export --format onnx` in onnxruntime on the CPU: what the graph computes against dsq's runtime. run.py calls them."""

import gzip
import hashlib
import json
import subprocess

import numpy as np

# Flags of `dsq quantize`.
LM_EXPORTS = {
    "w4-g32": ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f32"],
    "w4-g32-asym-bf16": ["--scheme", "W4A16", "--group-size", "32", "--asymmetric", "--scale-dtype", "bf16"],
    "w4-g16-asym": ["--scheme", "W4A16", "--group-size", "16", "--asymmetric", "--scale-dtype", "f32"],
    "w4-channel": ["--scheme", "W4A16", "--granularity", "channel", "--scale-dtype", "f32"],
    "w8-g32": ["--scheme", "W8A16", "--group-size", "32", "--scale-dtype", "f32"],
    "w8-channel-asym": ["--scheme", "W8A16", "--granularity", "channel", "--asymmetric", "--scale-dtype", "f32"],
    "w3-g32": ["--scheme", "W3A16", "--group-size", "32", "--scale-dtype", "f32"],
    "w2-g32-asym": ["--scheme", "W2A16", "--group-size", "32", "--asymmetric", "--scale-dtype", "f32"],
}
# `dsq quantize` of EfficientNet-Lite0, calibrated on pictures.
IMAGE_EXPORTS = {
    "w8a8": ["--scheme", "W8A8"],
    "w4a8-equalized": ["--scheme", "W4A8", "--equalize", "--correct-bias"],
}
# Of image models: see `image_difference`.
INTEGER_BOUND = 2e-5
IMAGE_BOUND = 0.7


def lm_bound(folder):
    """Largest |difference| over largest |logit|: EXPORT_BOUND of run.py, or what can be derived if that is less. Both sides sum in f32 in an order of their own: a sum of k products is off by at most
    k 2^-24 of the sum of their magnitudes, on each side. Chained over four products a layer and the head."""
    c = json.loads((folder / "config.json").read_text())
    heads = c["num_attention_heads"] * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
    longest = max(c["hidden_size"], c["intermediate_size"], heads)
    return min(1e-4, 2 * (4 * c["num_hidden_layers"] + 1) * longest * 2.0 ** -24)


class Lm:
    """A language model of `dsq export --format onnx`."""

    def __init__(self, path, config):
        import onnx
        import onnxruntime
        onnx.checker.check_model(str(path), full_check=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: i.shape for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.vocab = config["vocab_size"]

    def empty(self, batch):
        shapes = {n: s for n, s in self.inputs.items() if n.startswith("past_key_values.")}
        return {n: np.zeros((batch, s[1], 0, s[3]), np.float32) for n, s in shapes.items()}

    def __call__(self, ids, mask=None, past=None):
        """Logits `[batch, sequence, vocab]`, and the past with these tokens appended."""
        ids = np.asarray(ids, np.int64)
        past = self.empty(len(ids)) if past is None else past
        if mask is None:
            before = next(iter(past.values())).shape[2]
            mask = np.ones((len(ids), before + ids.shape[1]))
        feed = {"input_ids": ids, "attention_mask": np.asarray(mask, np.int64), **past}
        out = dict(zip(self.outputs, self.session.run(None, feed)))
        return out["logits"], {n.replace("present", "past_key_values"): v for n, v in out.items() if n != "logits"}


def difference(ours, theirs):
    return float(max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True)))


def lm_paths(model, sequences):
    """The logits of every sequence, run in four ways: as a whole; the last tokens one by one on a past; the second half at once on a
    past; and all in one batch, padded on the left, each in two parts."""
    whole = [model([s])[0][0] for s in sequences]
    steps, halves = [], []
    for s in sequences:
        logits, past = model([s[:-4]])
        rows = [logits[0]]
        for token in s[-4:]:
            logits, past = model([[token]], past=past)
            rows.append(logits[0])
        steps.append(np.concatenate(rows))
        at = len(s) // 2
        first, past = model([s[:at]])
        second, _ = model([s[at:]], past=past)
        halves.append(np.concatenate([first[0], second[0]]))
    longest = max(map(len, sequences))
    ids = np.array([[0] * (longest - len(s)) + s for s in sequences])
    mask = np.array([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    at = longest - 3
    first, past = model(ids[:, :at], mask[:, :at])
    second, _ = model(ids[:, at:], mask, past)
    padded = [row[-len(s):] for row, s in zip(np.concatenate([first, second], 1), sequences)]
    return {"whole": whole, "one by one": steps, "two halves": halves, "padded batch": padded}


def lm_logits(ctx, expect, folder, out, sequences, more=()):
    """`folder`: what is exported, with the flags `more` if it is in float; `out`: the file. dsq's runtime gives the reference."""
    config = json.loads((folder / "config.json").read_text())
    if more:
        # Lists stay f32 in the file; in a folder all are rounded.
        floats = out.with_suffix("")
        ctx.dsq("export", folder, "--out", floats, "--format", "safetensors", *more)
        folder = floats
    ctx.dsq("export", folder, "--out", out, "--format", "onnx", *more)
    reference = [np.asarray(t) for t in ctx.dsq.logits(folder, sequences)]
    model, bound = Lm(out, config), lm_bound(folder)
    found = {way: difference(logits, reference) for way, logits in lm_paths(model, sequences).items()}
    figure = ", ".join(f"{way} {worst:.1e}" for way, worst in found.items())
    return expect(max(found.values()) <= bound, f"max |difference| / max |logit| (bound {bound:.1e}): {figure}")


def image_session(path, optimized):
    import onnx
    import onnxruntime
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def lite0_inputs(folder):
    """The central square of the pictures of a folder as EfficientNet-Lite0 wants it."""
    from PIL import Image
    pictures = []
    for path in sorted(folder.glob("*.jpg")):
        picture = Image.open(path).convert("RGB")
        side = int(min(picture.size) * 0.875)
        left, top = ((n - side) // 2 for n in picture.size)
        picture = picture.crop((left, top, left + side, top + side)).resize((224, 224), Image.BICUBIC)
        pictures.append((np.asarray(picture, np.float32).transpose(2, 0, 1) - 127) / 128)
    return np.stack(pictures).astype(np.float32)


def fashion_inputs(path, config):
    """Pictures of an IDX file as the residual network wants them."""
    raw = gzip.decompress(path.read_bytes())
    count, side = int.from_bytes(raw[4:8], "big"), int.from_bytes(raw[8:12], "big")
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(count, 1, side, side)[:200]
    mean, std = (np.array(config[k], np.float32).reshape(1, -1, 1, 1) for k in ("mean", "std"))
    return ((pixels.astype(np.float32) / 255 - mean) / std).astype(np.float32)


def image_logits(ctx, binary, model, x):
    """dsq's runtime: the example `image_logits` of dsq-runtime."""
    from safetensors.numpy import load_file, save_file
    tag = hashlib.sha256(f"{model}".encode()).hexdigest()[:12]
    given, out = ctx.work / f"images-{tag}.safetensors", ctx.work / f"image-logits-{tag}.safetensors"
    save_file({"images": np.ascontiguousarray(x)}, given)
    subprocess.run([binary, str(model), str(given), str(out)], check=True, capture_output=True)
    return load_file(out)["logits"]


def image_integers(path, x):
    """The logits of a graph in QDQ form by the arithmetic of dsq's runtime: codes less zero points are multiplied and summed as integers,
    times the product of the two scales, plus the bias, each rounded to f32; a zero point is added before rounding."""
    import onnx
    import torch
    from onnx import numpy_helper
    graph = onnx.load(str(path)).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    values = {n: v.astype(np.int8) if v.dtype.itemsize == 1 else v for n, v in values.items()}
    limits = {t.name: (-8, 7) if t.data_type == onnx.TensorProto.INT4 else (-128, 127) for t in graph.initializer}
    values["pixel_values"] = x
    codes = {}

    def product(node, of):
        """Exact sums of `of` on codes, or on values where there are none, and what they are multiplied with."""
        left, right = (codes.get(n, (values[n], np.float32(1))) for n in node.input[:2])
        both = node.input[0] in codes and node.input[1] in codes
        if not both:
            left, right = ((values[n], np.float32(1)) for n in node.input[:2])
        sums = of(*(torch.from_numpy(np.asarray(v, np.float64)) for v in (left[0], right[0]))).numpy().astype(np.float32)
        scale = np.broadcast_to(np.float32(right[1]) * np.float32(left[1]), sums.shape[1:2]).reshape(1, -1, *[1] * (sums.ndim - 2))
        out = sums * scale
        if len(node.input) > 2:
            out = out + values[node.input[2]].reshape(scale.shape)
        return out

    for node in graph.node:
        given = [values.get(n) for n in node.input]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        match node.op_type:
            case "QuantizeLinear":
                low, high = limits[node.input[2]]
                out = np.rint(np.clip(given[0] / given[1] + np.float32(given[2]), low, high))
            case "DequantizeLinear":
                zero = given[2] if len(given) > 2 else np.int8(0)
                shape = (-1,) + (1,) * (given[0].ndim - 1) if given[1].ndim else ()
                less = given[0].astype(np.float32) - zero.astype(np.float32).reshape(shape if zero.ndim else ())
                codes[node.output[0]] = (less, given[1])
                out = less * given[1].reshape(shape)
            case "Conv":
                (top, left, bottom, right), stride = attributes["pads"], attributes["strides"]
                out = product(node, lambda x, w: torch.nn.functional.conv2d(
                    torch.nn.functional.pad(x, (left, right, top, bottom)), w, stride=stride, groups=attributes["group"]))
            case "Gemm":
                out = product(node, lambda x, w: x @ w.T)
            case "MaxPool":
                out = torch.nn.functional.max_pool2d(torch.from_numpy(given[0]), attributes["kernel_shape"], attributes["strides"],
                                                     attributes["pads"][:2]).numpy()
            case "GlobalAveragePool":
                pixels = given[0].reshape(*given[0].shape[:2], -1)
                out = (np.cumsum(pixels, -1, dtype=np.float32)[..., -1:] * np.float32(1 / pixels.shape[2]))[..., None]
            case "Flatten":
                out = given[0].reshape(len(given[0]), -1)
            case "Clip":
                out = np.clip(given[0], given[1], given[2])
            case "Relu":
                out = np.maximum(given[0], np.float32(0))
            case "Add":
                out = given[0] + given[1]
            case "Min":
                out = np.minimum(given[0], given[1])
            case "Identity":
                out = given[0]
            case other:
                raise ValueError(f"no {other} here")
        values[node.output[0]] = out
    return values["logits"]


def image_difference(ctx, expect, binary, model, float_model, x, out):
    """Read as integers (`image_integers`) the graph must give dsq's logits to the last bits: codes, scales, grids, pads and order are
    the same. (Layers in float are summed in another order: 2e-5 of the largest logit.)

    onnxruntime computes in f32 on the values of the codes: a sum differs by its rounding, which moves a code of the next layer by one
    where a value lies that near the middle between two, and what is moved moves others. Two such computations differ less than two
    independent roundings would, sqrt(2) of what rounding changes at all. With its optimizations onnxruntime rounds biases and outputs
    to grids of its own; that is printed only."""
    ctx.dsq("export", model, "--out", out, "--format", "onnx")
    ours = image_logits(ctx, binary, model, x)
    change = np.sqrt(np.mean((ours - image_logits(ctx, binary, float_model, x)) ** 2))
    few = 600_000 // x[0].size
    exact = difference([image_integers(out, x[:few])], [ours[:few]])
    figures = [f"as integers: max |difference| / max |logit| {exact:.1e} (bound {INTEGER_BOUND:.0e})"]
    expect(exact <= INTEGER_BOUND, figures[0])
    for optimized in (False, True):
        theirs = image_session(out, optimized).run(None, {"pixel_values": x})[0]
        share = float(np.sqrt(np.mean((ours - theirs) ** 2)) / change)
        same = int((ours.argmax(1) == theirs.argmax(1)).sum())
        figures.append(f"onnxruntime {'optimized' if optimized else 'as written'}: {share:.1e} of what quantization changes,"
                       f" same class {same}/{len(x)}")
        if not optimized:
            expect(share <= IMAGE_BOUND, f"{figures[-1]} (bound {IMAGE_BOUND})")
    return "; ".join(figures)


def image_float(ctx, expect, binary, model, x, out):
    ctx.dsq("export", model, "--out", out, "--format", "onnx")
    ours, theirs = image_logits(ctx, binary, model, x), image_session(out, True).run(None, {"pixel_values": x})[0]
    worst, same = difference([theirs], [ours]), int((ours.argmax(1) == theirs.argmax(1)).sum())
    return expect(worst <= 1e-4 and same == len(x), f"max |difference| / max |logit| {worst:.1e} (bound 1e-4), same class {same}/{len(x)}")
