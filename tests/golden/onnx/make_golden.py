#!/usr/bin/env python3
"""Makes tiny.onnx with the Python package onnx: every message and field that dsq writes, once. The test in
crates/dsq-checkpoint/src/onnx/proto.rs reads it. Written with onnx 1.23.2."""

import pathlib

from onnx import TensorProto, helper

HERE = pathlib.Path(__file__).resolve().parent


def tensor(name, data_type, dims, raw):
    out = TensorProto(name=name, data_type=data_type, raw_data=raw)
    out.dims.extend(dims)
    return out


beside = TensorProto(name="beside", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
beside.dims.extend([2, 300])
for key, value in (("location", "tiny.onnx.data"), ("offset", "4096"), ("length", "2400")):
    entry = beside.external_data.add()
    entry.key, entry.value = key, value

product = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["product"], "product", domain="com.microsoft", K=16, N=2)
moved = helper.make_node("Transpose", ["product"], ["y"], "y", perm=[1, 0])
graph = helper.make_graph(
    [product, moved], "tiny",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, "batch"])],
    [tensor("codes", TensorProto.UINT8, [2, 1, 8], bytes(range(16))), tensor("four", TensorProto.INT4, [3], b"\x78\x0f"),
     tensor("scales", TensorProto.FLOAT, [2, 1], bytes([0, 0, 0, 63, 0, 0, 128, 191])), beside])
model = helper.make_model(
    graph, producer_name="golden", producer_version="1", ir_version=10,
    opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
helper.set_model_props(model, {"key": "value"})
(HERE / "tiny.onnx").write_bytes(model.SerializeToString(deterministic=True))
