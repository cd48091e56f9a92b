//! A graph under construction: nodes in the order in which they run, and the tensors that it holds, declared before any weight is
//! read for writing. Not a model (see `llama.rs`, `cnn.rs`) and not the bytes of its weights (see `weights.rs`).

use super::proto::{
    AttributeProto, DataType, DimensionProto, NodeProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use super::weights::Blocks;
use crate::ConvLayer;
use std::collections::HashSet;

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Declared {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) ty: DataType,
}

impl Declared {
    pub(super) fn new(name: impl Into<String>, dims: &[usize], ty: DataType) -> Self {
        Self { name: name.into(), dims: dims.to_vec(), ty }
    }

    /// Bytes of its values.
    pub(super) fn bytes(&self) -> u64 {
        self.ty.bytes(self.dims.iter().map(|&d| d as u64).product())
    }
}

/// Where the values of a [`Unit`] come from.
#[derive(Debug)]
pub(super) enum Make {
    /// Bytes that follow from the config.
    Constant(Vec<u8>),
    /// A float tensor of the source, in the type that is declared.
    Float { name: String },
    /// Codes, scales and, if asymmetric, zero points of a module, as `MatMulNBits` has them.
    Blocks { module: String, layout: Blocks },
    /// The same as `DequantizeLinear` has them, with a scale for each output or one for all.
    Axis { module: String },
    /// Weight and bias of a layer with its batch norm folded in.
    Folded { layer: Box<ConvLayer> },
}

/// Tensors of the file that are made together.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) tensors: Vec<Declared>,
    pub(super) make: Make,
}

/// A dimension of an input or an output.
#[derive(Debug, Clone, Copy)]
pub(super) enum Dim {
    /// Always this.
    Fixed(usize),
    /// Whatever is given, the same wherever the name stands.
    Named(&'static str),
}

/// The graph.
#[derive(Debug, Default)]
pub(super) struct Graph {
    pub(super) nodes: Vec<NodeProto>,
    pub(super) units: Vec<Unit>,
    pub(super) inputs: Vec<ValueInfoProto>,
    pub(super) outputs: Vec<ValueInfoProto>,
    declared: HashSet<String>,
}

impl Graph {
    /// Appends a standard operator with one output; gives the output's name. (A node is called as its output.)
    pub(super) fn op(&mut self, op: &str, inputs: &[&str], output: impl Into<String>) -> String {
        self.op_with(op, inputs, output, vec![])
    }

    /// [`Graph::op`] with attributes.
    pub(super) fn op_with(
        &mut self,
        op: &str,
        inputs: &[&str],
        output: impl Into<String>,
        attribute: Vec<AttributeProto>,
    ) -> String {
        let output = output.into();
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|&i| i.to_owned()).collect(),
            output: vec![output.clone()],
            name: Some(output.clone()),
            op_type: Some(op.into()),
            attribute,
            domain: None,
        });
        output
    }

    /// Adds tensors, unless those of that name are there.
    pub(super) fn unit(&mut self, tensors: Vec<Declared>, make: Make) {
        if self.declared.insert(tensors[0].name.clone()) {
            self.units.push(Unit { tensors, make });
        }
    }

    /// A constant list of integers, as shapes and axes are given.
    pub(super) fn ints(&mut self, values: &[i64]) -> String {
        let text: Vec<String> = values.iter().map(i64::to_string).collect();
        let name = format!("const.ints.{}", text.join("_"));
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.unit(vec![Declared::new(&name, &[values.len()], DataType::Int64)], Make::Constant(bytes));
        name
    }

    /// A constant integer without dimensions.
    pub(super) fn int(&mut self, value: i64) -> String {
        let name = format!("const.int.{value}");
        let bytes = value.to_le_bytes().to_vec();
        self.unit(vec![Declared::new(&name, &[], DataType::Int64)], Make::Constant(bytes));
        name
    }

    /// A constant float without dimensions.
    pub(super) fn float(&mut self, name: &str, value: f32) -> String {
        let bytes = value.to_le_bytes().to_vec();
        self.unit(vec![Declared::new(name, &[], DataType::Float)], Make::Constant(bytes));
        name.to_owned()
    }

    /// Adds an input.
    pub(super) fn input(&mut self, name: &str, ty: DataType, dims: &[Dim]) {
        self.inputs.push(value_info(name, ty, dims));
    }

    /// Adds an output.
    pub(super) fn output(&mut self, name: &str, ty: DataType, dims: &[Dim]) {
        self.outputs.push(value_info(name, ty, dims));
    }
}

fn value_info(name: &str, ty: DataType, dims: &[Dim]) -> ValueInfoProto {
    let dim = |d: &Dim| match d {
        Dim::Fixed(n) => DimensionProto { dim_value: Some(*n as i64), dim_param: None },
        Dim::Named(name) => DimensionProto { dim_value: None, dim_param: Some((*name).to_owned()) },
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = TensorTypeProto { elem_type: Some(ty as i32), shape: Some(shape) };
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type: Some(tensor) }) }
}
