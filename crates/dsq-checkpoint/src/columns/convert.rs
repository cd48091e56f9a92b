//! What a quantized layer must become so that a GPTQ or AWQ folder holds it: the same codes with scales in f16. Not the packing (see
//! `mod.rs`).

use super::{FolderFormat, SCALES, shape_problem};
use crate::checkpoint::hex_sha256;
use crate::export::{CODES, ExportLoss, SourceRecord, values_of_codes};
use crate::tensor::float_bytes;
use crate::{CheckpointError, ExportTensor};
use dsq_quant::{ColumnOrder, FloatType, Granularity, Mapping, QuantArgs, QuantType, QuantizedMatrix};
use std::path::Path;

/// Why `format` cannot hold an `[n, k]` matrix of this scheme; `None` when it does. Scales of another dtype than f16 and zero points
/// are not looked at.
pub fn fit_problem(format: FolderFormat, args: &QuantArgs, n: usize, k: usize) -> Option<String> {
    let name = format.name();
    let types = match format {
        FolderFormat::CompressedTensors => return None,
        FolderFormat::Awq => &[QuantType::Int4][..],
        FolderFormat::GptqV1 | FolderFormat::GptqV2 => &QuantType::INTS,
    };
    if !types.contains(&args.qtype) {
        let names = types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
        return Some(format!("{name} has no {} weights; expected {names}", args.qtype.name()));
    }
    // Kernels of these tools work on 32 rows and columns at a time, whatever the width.
    let multiple = if format == FolderFormat::Awq { 8 } else { 32 };
    if !n.is_multiple_of(multiple) || !k.is_multiple_of(multiple) {
        return Some(format!("{name}: expected outputs and inputs that are multiples of {multiple}, got {n} and {k}"));
    }
    shape_problem(format, args.qtype.bits(), n, k)
}

/// Brings the quantized layers of an export into the form that `format` stores: scales for each output or group, in f16, and one
/// scheme for all (a symmetric layer among asymmetric ones gets zero points of 0). Codes stay, but of groups in activation order,
/// which AWQ does not have: there they are chosen anew. Layers that change get a [`SourceRecord`]. Nothing is done for compressed-tensors.
///
/// Returns how far values moved, which they do only where a scale is no f16 number, or groups lost their order.
///
/// # Errors
/// [`CheckpointError::Usage`] naming layer and reason: another type or shape than the format has, layers of several schemes, inputs on
/// a grid, a zero point of 0 in GPTQ v1; [`CheckpointError::Quant`] for a scale that f16 does not hold at all.
pub fn convert_layers(
    format: FolderFormat,
    file: &Path,
    layers: &mut [ExportTensor],
) -> Result<ExportLoss, CheckpointError> {
    let mut loss = ExportLoss::default();
    let mut common = CommonScheme::default();
    for layer in layers.iter_mut() {
        loss.merge(&convert_layer(format, file, layer)?);
        common.add(format, file, layer)?;
    }
    layers.iter_mut().try_for_each(|layer| finish_layer(format, file, layer, &common))?;
    Ok(loss)
}

/// What the layers of a GPTQ or AWQ folder have in common.
#[derive(Debug, Clone, Default)]
pub struct CommonScheme {
    first: Option<(String, QuantArgs)>,
    asymmetric: bool,
    /// Whether a layer has groups in activation order.
    ordered: bool,
}

impl CommonScheme {
    /// Takes in a layer that [`convert_layer`] made.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] for another scheme than that of the first.
    pub fn add(&mut self, format: FolderFormat, file: &Path, layer: &ExportTensor) -> Result<(), CheckpointError> {
        let ExportTensor::Linear { module, matrix, order, .. } = layer else { return Ok(()) };
        self.ordered |= order.is_some();
        if format == FolderFormat::CompressedTensors {
            return Ok(());
        }
        let b = matrix.args;
        self.asymmetric |= b.mapping == Mapping::Asymmetric;
        let (other, a) = self.first.get_or_insert_with(|| (module.clone(), b));
        if (a.qtype, a.granularity) == (b.qtype, b.granularity) {
            return Ok(());
        }
        let problem = format!(
            "{} has one scheme for all; expected that of {other} ({} {:?}), got {} {:?}",
            format.name(),
            a.qtype.name(),
            a.granularity,
            b.qtype.name(),
            b.granularity
        );
        Err(CheckpointError::usage(file, module.clone(), problem))
    }
}

/// The part of [`convert_layers`] that looks at one layer alone.
///
/// # Errors
/// As there.
pub fn convert_layer(
    format: FolderFormat,
    file: &Path,
    layer: &mut ExportTensor,
) -> Result<ExportLoss, CheckpointError> {
    let mut loss = ExportLoss::default();
    let ExportTensor::Linear { module, shape, matrix, source, activation, order } = layer else { return Ok(loss) };
    if format == FolderFormat::CompressedTensors {
        return Ok(loss);
    }
    let usage = |problem: String| Err(CheckpointError::usage(file, module.clone(), problem));
    if activation.is_some() {
        return usage(format!("{} has no grids of inputs; expected float inputs, got a scale", format.name()));
    }
    if shape.len() != 2 {
        return usage(format!("{} holds linear layers; expected shape [out, in], got {shape:?}", format.name()));
    }
    if format == FolderFormat::Awq && module == "lm_head" {
        return usage("AWQ has no quantized output matrix; expected floats, got codes".into());
    }
    if let Some(problem) = fit_problem(format, &matrix.args, matrix.n, matrix.k) {
        return usage(problem);
    }
    let before = values_of_codes(matrix, order.as_ref());
    let quant = |e| CheckpointError::quant(file, module.clone(), e);
    if order.is_some() && format == FolderFormat::Awq {
        // AWQ has no index of groups: codes are chosen anew on runs of inputs.
        *order = None;
        let args = QuantArgs { scale_dtype: SCALES, ..matrix.args };
        *matrix = QuantizedMatrix::quantize(&before, matrix.n, matrix.k, args).map_err(quant)?;
    }
    convert(format, matrix);
    matrix.validate().map_err(quant)?;
    let after = values_of_codes(matrix, order.as_ref());
    loss.add(module, &before, &after);
    source.get_or_insert_with(|| {
        let hash = hex_sha256(&float_bytes(&before, FloatType::F32));
        SourceRecord::with_values(hash, CODES.into(), &before, &after)
    });
    Ok(loss)
}

/// The part of [`convert_layers`] that follows from all layers: what they have in `common`.
///
/// # Errors
/// As there.
pub fn finish_layer(
    format: FolderFormat,
    file: &Path,
    layer: &mut ExportTensor,
    common: &CommonScheme,
) -> Result<(), CheckpointError> {
    let ExportTensor::Linear { module, matrix, order, .. } = layer else { return Ok(()) };
    // What servers compute as one matrix has one scheme: all layers in groups get a list, or none.
    let grouped = matches!(matrix.args.granularity, Granularity::PerGroup(_)) && matrix.args.qtype.float().is_none();
    if common.ordered && format != FolderFormat::Awq && grouped && order.is_none() {
        *order = Some(ColumnOrder::identity(matrix.k));
    }
    if common.asymmetric && format.is_gptq() && matrix.args.mapping == Mapping::Symmetric {
        matrix.args.mapping = Mapping::Asymmetric;
        matrix.zeros = vec![0; matrix.scales.len()];
    }
    let qmin = matrix.args.qtype.qmin();
    let lowest = matrix.zeros.iter().filter(|&&z| i32::from(z) == qmin).count();
    if format == FolderFormat::GptqV1 && lowest > 0 {
        let problem = format!(
            "GPTQ v1 stores zero points less one, and 0 would borrow from its neighbour; expected 1 to {}, got 0 in {lowest} groups",
            matrix.args.qtype.qmax() - qmin
        );
        return Err(CheckpointError::usage(file, module.clone(), problem)
            .with_hint("--gptq-version v2 stores zero points as they are"));
    }
    Ok(())
}

/// The same codes in the form of the format.
fn convert(format: FolderFormat, matrix: &mut QuantizedMatrix) {
    if matrix.args.granularity == Granularity::PerTensor {
        matrix.args.granularity = Granularity::PerChannel;
        matrix.scales = vec![matrix.scales[0]; matrix.n];
        if let Some(&zero) = matrix.zeros.first() {
            matrix.zeros = vec![zero; matrix.n];
        }
    }
    matrix.scales.iter_mut().for_each(|s| *s = SCALES.round(*s));
    matrix.args.scale_dtype = SCALES;
    // As it is read back.
    if format == FolderFormat::Awq && matrix.zeros.iter().all(|&z| z == 0) {
        matrix.args.mapping = Mapping::Symmetric;
        matrix.zeros.clear();
    }
    // Where scales came from is not stored.
    matrix.args.observer = Default::default();
}
