//! The graphs of the image models: `QuantizeLinear` and `DequantizeLinear` around standard convolutions, on the grids that the folder
//! has. What `dsq-runtime` computes with integers is computed here on the values of the same codes. Not the weights.
//!
//! Input `pixel_values` FLOAT `[batch, channels, height, width]`, normalized (the metadata of the file says how); output `logits` FLOAT
//! `[batch, classes]`.
//!
//! `QuantizeLinear` rounds `x / scale` to the nearest even number and adds the zero point; dsq adds it first. The two differ only
//! where `x / scale` lies on, or within a rounding error of, the middle between two codes.

use super::graph::{Declared, Dim, Graph, Make};
use super::proto::{AttributeProto, DataType};
use super::source::Source;
use super::weights::{code_bytes, code_type};
use crate::{Activation, CheckpointError, ConvLayer, ImageConfig, MAX_POOL, ModelConfig, Pool, ResNetConfig};

/// What lies around a convolution.
struct Geometry {
    stride: usize,
    /// Zeros above and below, left and right.
    pads: [[usize; 2]; 2],
    /// 1, or the channels of a depthwise convolution.
    group: usize,
}

fn ends(g: &mut Graph, channels: usize, [h, w]: [usize; 2], classes: usize) {
    let batch = Dim::Named("batch_size");
    g.input("pixel_values", DataType::Float, &[batch, Dim::Fixed(channels), Dim::Fixed(h), Dim::Fixed(w)]);
    g.output("logits", DataType::Float, &[batch, Dim::Fixed(classes)]);
}

/// The graph of dsq's residual network.
///
/// # Errors
/// [`CheckpointError::Usage`] for batch norm that is not folded and schemes that have no operator; errors of reading.
pub(super) fn resnet(source: &Source, c: &ResNetConfig) -> Result<Graph, CheckpointError> {
    let mut g = Graph::default();
    ends(&mut g, c.in_channels, [c.image_size; 2], c.num_classes);
    let mut x = "pixel_values".to_owned();
    let mut first = String::new();
    let specs = ModelConfig::ResNet(c.clone()).linears();
    for (i, spec) in specs.iter().enumerate() {
        let module = spec.module.as_str();
        if source.ckpt.info(&format!("{module}.bn.weight")).is_some() {
            let problem = "expected batch norm folded into weight and bias, as an export of dsq has it, got bn.weight";
            return Err(source.refuse(module, problem));
        }
        let part = module.rsplit('.').next().unwrap_or(module);
        let strided = module.ends_with(".0.conv1") || module.ends_with(".0.downsample");
        let stride = if strided && !module.starts_with("layer1.") { 2 } else { 1 };
        let geometry = |side: usize| Geometry { stride, pads: [[side / 2; 2]; 2], group: 1 };
        match (part, &spec.shape[..]) {
            ("fc", shape) => {
                let pooled = g.op("GlobalAveragePool", &[&x], "pool");
                x = classifier(&mut g, source, module, &pooled, shape, None)?;
            }
            // Reads what the block's first convolution read.
            ("downsample", shape) => {
                let skip = conv(&mut g, source, module, &first, shape, &geometry(shape[2]), None)?;
                x = add_skip(&mut g, module, &x, &skip);
            }
            ("conv2", shape) => {
                x = conv(&mut g, source, module, &x, shape, &geometry(shape[2]), None)?;
                let block = module.trim_end_matches(".conv2");
                if specs.get(i + 1).is_none_or(|next| next.module != format!("{block}.downsample")) {
                    x = add_skip(&mut g, module, &x, &first);
                }
            }
            (_, shape) => {
                first = x.clone();
                let y = conv(&mut g, source, module, &x, shape, &geometry(shape[2]), None)?;
                x = g.op("Relu", &[&y], format!("{module}/Relu"));
            }
        }
    }
    g.op("Identity", &[&x], "logits");
    Ok(g)
}

/// The end of a residual block.
fn add_skip(g: &mut Graph, module: &str, x: &str, skip: &str) -> String {
    let sum = g.op("Add", &[x, skip], format!("{module}/Add"));
    g.op("Relu", &[&sum], format!("{module}/AddRelu"))
}

/// The graph of an image model, with batch norm folded.
///
/// # Errors
/// [`CheckpointError::Usage`] for schemes that have no operator; errors of reading.
pub(super) fn image(source: &Source, c: &ImageConfig) -> Result<Graph, CheckpointError> {
    let mut g = Graph::default();
    let mut size = c.preparation.size;
    ends(&mut g, c.channels, size, c.num_classes);
    let (mut x, mut skip) = ("pixel_values".to_owned(), String::new());
    // Of the skip, where it is another.
    let mut skip_size = size;
    for layer in &c.layers() {
        let module = layer.module.as_str();
        match layer.pool {
            Some(Pool::Max) => {
                let [kernel, stride, pad] = MAX_POOL.map(|v| v as i64);
                let attributes = vec![
                    AttributeProto::ints("kernel_shape", &[kernel; 2]),
                    AttributeProto::ints("strides", &[stride; 2]),
                    AttributeProto::ints("pads", &[pad; 4]),
                ];
                x = g.op_with("MaxPool", &[&x], format!("{module}/MaxPool"), attributes);
                let [kernel, stride, pad] = MAX_POOL;
                size = size.map(|side| (side + 2 * pad - kernel) / stride + 1);
            }
            Some(Pool::Mean) => {
                let pooled = g.op("GlobalAveragePool", &[&x], "pool");
                x = classifier(&mut g, source, module, &pooled, &layer.stored_shape(), Some(layer))?;
                continue;
            }
            None => {}
        }
        if layer.starts_block {
            skip.clone_from(&x);
            skip_size = size;
        }
        let (input, from) = if layer.on_skip { (&skip, skip_size) } else { (&x, size) };
        let group = if layer.depthwise { layer.shape[0] } else { 1 };
        let geometry = Geometry { stride: layer.stride, pads: layer.pads(from), group };
        let mut y = conv(&mut g, source, module, input, &layer.shape, &geometry, Some(layer))?;
        let out = layer.output(from);
        if layer.adds_skip {
            y = g.op("Add", &[&y, &skip], format!("{module}/Add"));
        }
        y = match layer.activation {
            None => y,
            Some(Activation::Relu) => g.op("Relu", &[&y], format!("{module}/Relu")),
            Some(Activation::Relu6) => clip(&mut g, c, layer, &y),
        };
        if layer.on_skip {
            (skip, skip_size) = (y, out);
        } else {
            (x, size) = (y, out);
        }
    }
    g.op("Identity", &[&x], "logits");
    Ok(g)
}

/// ReLU6, or what equalisation made of it.
fn clip(g: &mut Graph, c: &ImageConfig, layer: &ConvLayer, x: &str) -> String {
    let module = &layer.module;
    if !c.channel_clip {
        let (zero, six) = (g.float("const.zero", 0.0), g.float("const.six", 6.0));
        return g.op("Clip", &[x, &zero, &six], format!("{module}/Clip"));
    }
    let name = format!("{module}.clip");
    let dims = [layer.shape[0], 1, 1];
    g.unit(vec![Declared::new(&name, &dims, DataType::Float)], Make::Float { name: name.clone() });
    let positive = g.op("Relu", &[x], format!("{module}/Relu"));
    g.op("Min", &[&positive, &name], format!("{module}/Min"))
}

/// The input of a layer on its grid, where it has one.
fn on_grid(g: &mut Graph, source: &Source, module: &str, x: &str) -> Result<String, CheckpointError> {
    if let Some(args) = source.ckpt.dynamic_activation(module) {
        let got = args.granularity;
        return Err(source.refuse(module, format!("expected one static scale for the input of a layer, got {got:?}")));
    }
    let Some((args, p)) = source.ckpt.activation(module)? else { return Ok(x.to_owned()) };
    if args.qtype.float().is_some() || !matches!(args.qtype.bits(), 4 | 8) {
        return Err(source.refuse(module, format!("expected inputs in INT4 or INT8, got {}", args.qtype.name())));
    }
    let scale = g.float(&format!("{module}.input_scale"), p.scale);
    let (zero, ty) = (format!("{module}.input_zero_point"), code_type(&args));
    g.unit(vec![Declared::new(&zero, &[], ty)], Make::Constant(code_bytes(&[p.zero as i8], ty)));
    let codes = g.op("QuantizeLinear", &[x, &scale, &zero], format!("{module}/QuantizeLinear"));
    Ok(g.op("DequantizeLinear", &[&codes, &scale, &zero], format!("{module}/DequantizeLinear")))
}

fn conv(
    g: &mut Graph,
    source: &Source,
    module: &str,
    x: &str,
    shape: &[usize],
    geometry: &Geometry,
    folded: Option<&ConvLayer>,
) -> Result<String, CheckpointError> {
    let x = on_grid(g, source, module, x)?;
    let (w, bias) = source.conv_weight(g, module, shape, folded)?;
    let inputs: Vec<&str> = [x.as_str(), &w].into_iter().chain(bias.as_deref()).collect();
    let (stride, [[top, bottom], [left, right]]) = (geometry.stride as i64, geometry.pads.map(|p| p.map(|n| n as i64)));
    let attributes = vec![
        AttributeProto::ints("kernel_shape", &[shape[2] as i64, shape[3] as i64]),
        AttributeProto::ints("strides", &[stride; 2]),
        AttributeProto::ints("pads", &[top, left, bottom, right]),
        AttributeProto::int("group", geometry.group as i64),
    ];
    Ok(g.op_with("Conv", &inputs, format!("{module}/Conv"), attributes))
}

/// The last layer, a matrix `[classes, channels]` over the pooled picture.
fn classifier(
    g: &mut Graph,
    source: &Source,
    module: &str,
    pooled: &str,
    shape: &[usize],
    folded: Option<&ConvLayer>,
) -> Result<String, CheckpointError> {
    let flat = g.op_with("Flatten", &[pooled], "pool/Flatten", vec![AttributeProto::int("axis", 1)]);
    let x = on_grid(g, source, module, &flat)?;
    let (w, bias) = source.conv_weight(g, module, shape, folded)?;
    let inputs: Vec<&str> = [x.as_str(), &w].into_iter().chain(bias.as_deref()).collect();
    Ok(g.op_with("Gemm", &inputs, format!("{module}/Gemm"), vec![AttributeProto::int("transB", 1)]))
}
