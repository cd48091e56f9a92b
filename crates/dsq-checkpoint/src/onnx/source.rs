//! What a model's tensors become in an ONNX file: the type of each, and the bytes when they are wanted. Not the graph around them.

use super::graph::{Declared, Graph, Make, Unit};
use super::proto::{AttributeProto, DataType, MICROSOFT};
use super::weights::{Blocks, axis_declared, axis_store};
use crate::tensor::{conversion_loss, float_bytes};
use crate::{Checkpoint, CheckpointError, ConvLayer, LinearWeight};
use dsq_quant::{FloatType, QuantError, QuantizedMatrix};

/// A model that is to be written.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) ckpt: &'a Checkpoint,
    /// Type of float matrices; `None`: as stored, f32 where that is no float of the source.
    pub(super) dtype: Option<FloatType>,
}

impl Source<'_> {
    /// What cannot be written, by the name of its tensor.
    pub(super) fn refuse(&self, tensor: &str, problem: impl std::fmt::Display) -> CheckpointError {
        CheckpointError::usage(self.ckpt.path(), "--format", format!("{tensor}: {problem}"))
    }

    /// The weight of a module: its codes where they and their scales stand for exactly the values of the source, else floats.
    pub(super) fn weight(&self, module: &str) -> Result<LinearWeight, CheckpointError> {
        if let Some(matrix) = self.ckpt.block_codes(module)?
            && matrix.dequantize() == self.ckpt.read_f32(&format!("{module}.weight"))?
        {
            return Ok(LinearWeight::Quantized(matrix));
        }
        self.ckpt.linear(module)
    }

    /// The codes of a module that has some.
    pub(super) fn codes(&self, module: &str) -> Result<QuantizedMatrix, CheckpointError> {
        match self.weight(module)? {
            LinearWeight::Quantized(matrix) | LinearWeight::Ordered { matrix, .. } => Ok(matrix),
            LinearWeight::Float { .. } => Err(self.ckpt.invalid(module, "expected codes, got floats")),
        }
    }

    /// The values of a float tensor; of a module whose codes have no place in the file, what they stand for.
    pub(super) fn values(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let values = match name.strip_suffix(".weight").filter(|m| self.ckpt.is_quantized(m)) {
            Some(module) => self.ckpt.linear(module)?.into_f32(),
            None => self.ckpt.read_f32(name)?,
        };
        match values.iter().position(|x| !x.is_finite()) {
            None => Ok(values),
            Some(index) => {
                let count = values.iter().filter(|x| !x.is_finite()).count();
                let e = QuantError::NonFinite { index, value: values[index], count };
                Err(CheckpointError::quant(self.ckpt.path(), name, e))
            }
        }
    }

    /// The type of a float matrix in the file.
    pub(super) fn float_type(&self, name: &str) -> FloatType {
        let stored = || self.ckpt.info(name).and_then(|i| FloatType::ALL.into_iter().find(|f| f.name() == i.dtype));
        self.dtype.or_else(stored).unwrap_or(FloatType::F32)
    }

    /// Declares the float tensor `name` in the shape `dims`: a matrix in its type, a list in f32, which holds every value. Gives the
    /// name and the type.
    pub(super) fn declare(&self, graph: &mut Graph, name: &str, dims: &[usize]) -> DataType {
        let ty = if dims.len() > 1 { data_type(self.float_type(name)) } else { DataType::Float };
        graph.unit(vec![Declared::new(name, dims, ty)], Make::Float { name: name.into() });
        ty
    }

    /// [`Source::declare`], and a cast where the tensor is not in f32; gives the name of the f32 values.
    pub(super) fn float(&self, graph: &mut Graph, name: &str, dims: &[usize]) -> String {
        let ty = self.declare(graph, name, dims);
        cast(graph, name, ty)
    }

    /// `x W^T + bias` of a linear layer over the last dimension; gives the name of the result.
    pub(super) fn linear(&self, graph: &mut Graph, module: &str, x: &str) -> Result<String, CheckpointError> {
        let product = match self.weight(module)? {
            weight @ (LinearWeight::Quantized(_) | LinearWeight::Ordered { .. }) => {
                let (m, order) = match weight {
                    LinearWeight::Ordered { matrix, order } => (matrix, Some(order)),
                    LinearWeight::Quantized(matrix) => (matrix, None),
                    LinearWeight::Float { .. } => return Err(self.ckpt.invalid(module, "expected codes, got floats")),
                };
                let x = &match order {
                    None => x.to_owned(),
                    // Codes lie group by group; so must the inputs.
                    Some(order) => {
                        let name = format!("{module}.order");
                        let bytes = order.inputs().iter().flat_map(|&i| i64::from(i).to_le_bytes()).collect();
                        graph.unit(vec![Declared::new(&name, &[m.k], DataType::Int64)], Make::Constant(bytes));
                        let last = vec![AttributeProto::int("axis", -1)];
                        graph.op_with("Gather", &[x, &name], format!("{module}/Gather"), last)
                    }
                };
                let layout = Blocks::of(&m.args, m.n, m.k).map_err(|problem| {
                    let hint =
                        "dsq export --format safetensors writes the values of the codes as floats, which ONNX holds";
                    self.refuse(module, problem).with_hint(hint)
                })?;
                let tensors = layout.declared(module);
                let names: Vec<String> = tensors.iter().map(|t| t.name.clone()).collect();
                graph.unit(tensors, Make::Blocks { module: module.into(), layout });
                let inputs: Vec<&str> = std::iter::once(x.as_str()).chain(names.iter().map(String::as_str)).collect();
                // 1: the products are summed in f32.
                let settings = [("K", m.k), ("N", m.n), ("bits", layout.bits), ("block_size", layout.block)];
                let mut attributes: Vec<_> = settings.map(|(n, v)| AttributeProto::int(n, v as i64)).into();
                attributes.push(AttributeProto::int("accuracy_level", 1));
                let out = graph.op_with("MatMulNBits", &inputs, format!("{module}/MatMulNBits"), attributes);
                if let Some(node) = graph.nodes.last_mut() {
                    node.domain = Some(MICROSOFT.into());
                }
                out
            }
            LinearWeight::Float { n, k, .. } => {
                let w = self.float(graph, &format!("{module}.weight"), &[n, k]);
                matmul(graph, module, x, &w)
            }
        };
        let bias = format!("{module}.bias");
        let Some(info) = self.ckpt.info(&bias).filter(|_| !self.ckpt.has_empty_bias(module)) else {
            return Ok(product);
        };
        let bias = self.float(graph, &bias, &info.shape);
        Ok(graph.op("Add", &[&product, &bias], format!("{module}/Add")))
    }

    /// The bytes of the tensors of a unit.
    pub(super) fn bytes(&self, unit: &Unit) -> Result<Vec<Vec<u8>>, CheckpointError> {
        match &unit.make {
            Make::Constant(bytes) => Ok(vec![bytes.clone()]),
            Make::Float { name } => Ok(vec![self.rounded(name, &self.values(name)?, unit.tensors[0].ty)?]),
            Make::Blocks { module, layout } => Ok(layout.store(&self.codes(module)?)),
            Make::Axis { module } => Ok(axis_store(&self.codes(module)?)),
            Make::Folded { layer } => {
                let (weight, bias) = self.ckpt.folded(layer)?;
                let stored = [(weight, "weight"), (bias, "bias")].into_iter().zip(&unit.tensors);
                stored.map(|((v, part), t)| self.rounded(&format!("{}.{part}", layer.module), &v, t.ty)).collect()
            }
        }
    }

    /// Values in a float type; one that becomes infinite is refused.
    fn rounded(&self, name: &str, values: &[f32], ty: DataType) -> Result<Vec<u8>, CheckpointError> {
        let ty = float_type(ty);
        if let Some((index, count)) = conversion_loss(values, ty).overflow {
            let got = values[index];
            let problem = format!("does not fit {ty}; expected finite values, got {got:e} at {index} ({count} in all)");
            return Err(
                CheckpointError::numerics(self.ckpt.path(), name, problem).with_hint("--dtype f32 or bf16 holds it")
            );
        }
        Ok(float_bytes(values, ty))
    }

    /// Declares the codes of a layer of an image model behind `DequantizeLinear`, or its floats; gives the names of f32 weight and
    /// bias.
    pub(super) fn conv_weight(
        &self,
        graph: &mut Graph,
        module: &str,
        shape: &[usize],
        folded: Option<&ConvLayer>,
    ) -> Result<(String, Option<String>), CheckpointError> {
        let n = shape[0];
        let bias = format!("{module}.bias");
        if let LinearWeight::Quantized(m) = self.weight(module)? {
            let tensors = axis_declared(module, shape, &m).map_err(|problem| self.refuse(module, problem))?;
            let names: Vec<String> = tensors.iter().map(|t| t.name.clone()).collect();
            graph.unit(tensors, Make::Axis { module: module.into() });
            let inputs: Vec<&str> = names.iter().map(String::as_str).collect();
            let out = format!("{module}.weight/DequantizeLinear");
            let w = graph.op_with("DequantizeLinear", &inputs, out, vec![AttributeProto::int("axis", 0)]);
            let bias = self.ckpt.info(&bias).map(|_| self.float(graph, &bias, &[n]));
            return Ok((w, bias));
        }
        let Some(layer) = folded else {
            let w = self.float(graph, &format!("{module}.weight"), shape);
            return Ok((w, self.ckpt.info(&bias).map(|_| self.float(graph, &bias, &[n]))));
        };
        let (weight, ty) = (format!("{module}.weight"), data_type(self.dtype.unwrap_or(FloatType::F32)));
        let tensors = vec![Declared::new(&weight, shape, ty), Declared::new(&bias, &[n], DataType::Float)];
        graph.unit(tensors, Make::Folded { layer: Box::new(layer.clone()) });
        Ok((cast(graph, &weight, ty), Some(bias)))
    }
}

/// `x W^T` of a float matrix `[n, k]`. (onnxruntime makes one product of the two operators.)
pub(super) fn matmul(graph: &mut Graph, module: &str, x: &str, w: &str) -> String {
    let perm = vec![AttributeProto::ints("perm", &[1, 0])];
    let transposed = graph.op_with("Transpose", &[w], format!("{module}/Transpose"), perm);
    graph.op("MatMul", &[x, &transposed], format!("{module}/MatMul"))
}

/// The f32 values of a tensor: itself, or behind a cast.
pub(super) fn cast(graph: &mut Graph, name: &str, ty: DataType) -> String {
    if ty == DataType::Float {
        return name.to_owned();
    }
    graph.op_with("Cast", &[name], format!("{name}/Cast"), vec![AttributeProto::int("to", DataType::Float as i64)])
}

fn data_type(ty: FloatType) -> DataType {
    match ty {
        FloatType::F16 => DataType::Float16,
        FloatType::Bf16 => DataType::Bfloat16,
        // Codes of eight bits are no type of a float tensor here.
        FloatType::F32 | FloatType::F8E4M3 | FloatType::F8E8M0 => DataType::Float,
    }
}

/// The float type of a tensor that holds floats.
pub(super) fn float_type(ty: DataType) -> FloatType {
    match ty {
        DataType::Float16 => FloatType::F16,
        DataType::Bfloat16 => FloatType::Bf16,
        _ => FloatType::F32,
    }
}
