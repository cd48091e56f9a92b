//! Digests of what an export stores, tensor kind by tensor kind, and the check that its codes and scales are what the
//! formula gives for the weights it was made from. Reads through `Checkpoint`, as the runtime does.
//!
//! Each digest is SHA-256 over, for every module in the order of names: the name, a zero byte, `n` and `k` as u64, and
//! the values, all little endian (codes and zero points one byte, scales f32). One bit of one value changes it.

use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, LinearWeight, hex_of};
use dsq_eval::Row;
use dsq_quant::QuantizedMatrix;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// What the digests are called in reports: codes, scales, zero points, static activation parameters, and every tensor
/// that is stored in float; of a GGUF file one of its tensors' stored bytes instead of all these.
pub const DIGESTS: [&str; 6] =
    ["codes_sha256", "scales_sha256", "zeros_sha256", "activations_sha256", "floats_sha256", "blocks_sha256"];

/// A digest over parts in the order they come, with a digest of each part.
#[derive(Default)]
struct Parts {
    whole: Sha256,
    parts: BTreeMap<String, String>,
}

impl Parts {
    fn add(&mut self, name: &str, shape: [usize; 2], bytes: &[u8]) {
        let mut part = Sha256::new();
        for hash in [&mut self.whole, &mut part] {
            hash.update(name.as_bytes());
            hash.update([0]);
            shape.iter().for_each(|d| hash.update((*d as u64).to_le_bytes()));
            hash.update(bytes);
        }
        self.parts.insert(name.into(), hex_of(&part.finalize()[..8]));
    }
}

/// Adds the digests of `export` to `row`; kinds that the export does not have are left out.
///
/// # Errors
/// Tensors that cannot be read.
pub fn add_digests(row: Row, export: &Checkpoint) -> Result<Row, CliError> {
    let mut digests: [Parts; DIGESTS.len()] = Default::default();
    let [codes, scales, zeros, activations, floats, blocks] = &mut digests;
    let mut names = export.names();
    names.sort();
    if export.is_gguf() {
        for name in &names {
            blocks.add(name, [1, 1], export.sha256(name)?.as_bytes());
        }
        return Ok(with_digests(row, digests));
    }
    let mut modules: Vec<String> = export.config().linears().into_iter().map(|l| l.module).collect();
    modules.sort();
    let mut quantized_prefixes = Vec::new();
    for module in &modules {
        if !export.is_quantized(module) {
            continue;
        }
        if let LinearWeight::Quantized(q) = export.linear(module)? {
            let shape = [q.n, q.k];
            codes.add(module, shape, &bytes_of(&q.codes));
            scales.add(module, shape, &q.scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>());
            if !q.zeros.is_empty() {
                zeros.add(module, shape, &bytes_of(&q.zeros));
            }
        }
        if let Some((_, p)) = export.activation(module)? {
            let bytes = [p.scale.to_le_bytes(), p.zero.to_le_bytes()].concat();
            activations.add(module, [1, 1], &bytes);
        }
        quantized_prefixes.push(format!("{module}.weight"));
        quantized_prefixes.push(format!("{module}.input_"));
    }
    for name in names.iter().filter(|n| !quantized_prefixes.iter().any(|p| n.starts_with(p))) {
        let (dtype, bytes) = export.read_stored(name)?;
        floats.add(&format!("{name} {dtype}"), [bytes.len(), 1], &bytes);
    }
    Ok(with_digests(row, digests))
}

fn with_digests(mut row: Row, digests: [Parts; DIGESTS.len()]) -> Row {
    for (metric, digest) in DIGESTS.into_iter().zip(digests) {
        if !digest.parts.is_empty() {
            row = row.text(metric, hex_of(&digest.whole.finalize()));
            row.parts.insert(metric.into(), digest.parts);
        }
    }
    row
}

fn bytes_of(codes: &[i8]) -> Vec<u8> {
    codes.iter().map(|q| *q as u8).collect()
}

/// How an export differs from what the formula gives.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Requantized {
    /// Codes, scales and zero points that differ.
    pub mismatches: usize,
    /// Values compared.
    pub compared: usize,
    /// The first module and value that differ.
    pub first: Option<String>,
}

/// Quantizes the weights that `export` was made from (`weights(module)`, `[n, k]` row major) with
/// [`QuantizedMatrix::quantize`] and compares every code, scale (bit for bit) and zero point with the export.
///
/// # Errors
/// Tensors that cannot be read, weights that cannot be quantized.
pub fn requantize(
    export: &Checkpoint,
    weights: &mut dyn FnMut(&str) -> Result<Vec<f32>, CliError>,
) -> Result<Requantized, CliError> {
    let mut out = Requantized::default();
    for spec in export.config().linears() {
        if !export.is_quantized(&spec.module) {
            continue;
        }
        let LinearWeight::Quantized(stored) = export.linear(&spec.module)? else { continue };
        let source = weights(&spec.module)?;
        let again = QuantizedMatrix::quantize(&source, stored.n, stored.k, stored.args)
            .map_err(|e| CliError::new(6, format!("{}: {}: {e}", export.path().display(), spec.module)))?;
        let scale_bits =
            |q: &QuantizedMatrix| -> Vec<i64> { q.scales.iter().map(|s| i64::from(s.to_bits())).collect() };
        let widen = |v: &[i8]| -> Vec<i64> { v.iter().map(|q| i64::from(*q)).collect() };
        for (what, a, b) in [
            ("scale", scale_bits(&stored), scale_bits(&again)),
            ("zero point", widen(&stored.zeros), widen(&again.zeros)),
            ("code", widen(&stored.codes), widen(&again.codes)),
        ] {
            out.compared += b.len();
            let differ: Vec<usize> = (0..b.len()).filter(|&i| a.get(i) != b.get(i)).collect();
            out.mismatches += differ.len();
            if let (None, Some(&i)) = (&out.first, differ.first()) {
                let show = |v: Option<&i64>| match v {
                    Some(&v) if what == "scale" => format!("{:e}", f32::from_bits(v as u32)),
                    Some(v) => v.to_string(),
                    None => "nothing".into(),
                };
                out.first =
                    Some(format!("{}: {what} {i}: expected {}, got {}", spec.module, show(b.get(i)), show(a.get(i))));
            }
        }
    }
    Ok(out)
}
