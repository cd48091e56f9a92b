//! The fixed-input checks: a small float model whose weights come from integer arithmetic (nothing is trained, no math
//! library is asked) is quantized, exported, read back and run. Codes, scales and zero points must be the same on any
//! hardware; the runtime's perplexity on fixed tokens must agree within the error of f32.
//!
//! Some groups are there for the corner they are: all zero, constant, every value a rounding tie, one outlier.

use super::digest::{add_digests, requantize};
use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, ExportTensor, LlamaConfig, ModelConfig, export_folder, hex_sha256};
use dsq_eval::{Report, Row, evaluate_text};
use dsq_quant::{
    FloatType, Granularity, Mapping, Pattern, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix,
};
use dsq_runtime::{LlamaRuntime, Logits};
use std::path::Path;

/// Changes when the inputs below change on purpose.
const VERSION: u32 = 1;

/// Tokens of a window, and windows.
const CONTEXT: usize = 48;
const WINDOWS: usize = 6;

/// The schemes that are checked, by row name.
pub(super) fn schemes() -> Vec<(&'static str, QuantArgs)> {
    let group = Granularity::PerGroup(32);
    let asymmetric = |dtype| QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(group, dtype) };
    vec![
        ("w4_g32_f32", QuantArgs::int4(group, FloatType::F32)),
        ("w4_g32_f16", QuantArgs::int4(group, FloatType::F16)),
        ("w4_g32_bf16", QuantArgs::int4(group, FloatType::Bf16)),
        ("w4_channel_f32", QuantArgs::int4(Granularity::PerChannel, FloatType::F32)),
        ("w4_g32_asym_f32", asymmetric(FloatType::F32)),
        ("w4_g32_asym_bf16", asymmetric(FloatType::Bf16)),
        (
            "w8_channel_f32",
            QuantArgs { qtype: QuantType::Int8, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) },
        ),
    ]
}

/// Grouped-query attention, an inner size that is no power of two, tied embeddings.
fn config() -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 80,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        rope_scaling: None,
        windows: Vec::new(),
        experts: None,
        latent: None,
        biases: Default::default(),
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
    }
}

/// SplitMix64 of two numbers: the source of everything below.
fn mix(stream: u64, i: u64) -> u64 {
    let mut z =
        stream.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Values in [-2^-2, 2^-2), multiples of 2^-22: exact in f32 on every machine. Denser near zero, as weights are: the
/// sum of four uniform values.
fn values(stream: u64, len: usize) -> Vec<f32> {
    (0..len as u64)
        .map(|i| {
            let h = mix(stream, i);
            let sum: i64 = (0..4).map(|part| ((h >> (16 * part)) & 0xffff) as i64 - 0x8000).sum();
            sum as f32 * (1.0 / (1u64 << 19) as f32)
        })
        .collect()
}

/// The weight `[n, k]` of module number `index`.
fn weight(index: u64, n: usize, k: usize) -> Vec<f32> {
    let mut w = values(100 + index, n * k);
    let group = |row: usize, g: usize| row * k + g * 32..row * k + g * 32 + 32;
    w[group(0, 0)].fill(0.0);
    w[group(1, 0)].fill(0.25);
    w[group(2, 0)].fill(-0.25);
    // Scale 2^-5 exactly (absmax / 7.5), every value half way between two codes: rounding to even and away differ.
    for (j, x) in w[group(3, 0)].iter_mut().enumerate() {
        *x = ((j % 16) as f32 - 7.5) / 32.0;
    }
    // The same for a row as one channel: its other values are small.
    w[group(4, 0)].fill(1.0 / 64.0);
    w[group(4, 0).start] = 7.5 / 32.0;
    w[group(4, 1)].iter_mut().for_each(|x| *x = -1.5 / 32.0);
    w[group(5, 1).start] = 3.0;
    w
}

/// The float weight of a module, for the tests that damage its codes.
#[cfg(test)]
pub(super) struct ModuleWeights {
    pub n: usize,
    pub k: usize,
    pub data: Vec<f32>,
}

/// The float weight of `module`.
#[cfg(test)]
pub(super) fn module_weights(module: &str) -> ModuleWeights {
    let linears = ModelConfig::Llama(config()).linears();
    let index = linears.iter().position(|l| l.module == module).expect("a module of the model");
    let (n, k) = (linears[index].n(), linears[index].k());
    ModuleWeights { n, k, data: weight(index as u64, n, k) }
}

/// A float tensor of the model that is not quantized. Logits come out between -3 and 3.
fn other(name: &str, shape: &[usize]) -> Vec<f32> {
    let stream = name.bytes().fold(7u64, |h, b| h.wrapping_mul(131).wrapping_add(u64::from(b)));
    let offset = if name.contains("norm") { 1.0 } else { 0.0 };
    values(stream, shape.iter().product()).iter().map(|x| offset + x).collect()
}

/// The fixed tokens.
fn tokens() -> Vec<u32> {
    (0..(CONTEXT * WINDOWS) as u64).map(|i| (mix(1, i) % config().vocab_size as u64) as u32).collect()
}

/// The digest that stands for a recipe's: of everything that decides the numbers below.
pub fn identity() -> String {
    // What a config has beyond the first baselines is left out where it says nothing, so that they stay usable.
    let model = format!("{:?}", config()).replace("rope_scaling: None, windows: [], experts: None, latent: None, biases: Biases { attention: false, mlp: false }, ", "");
    let text = format!("fixed {VERSION} {CONTEXT} {WINDOWS} {model} {:?}", schemes());
    hex_sha256(text.as_bytes())
}

/// Writes the float model, or with `args` the quantized one, to `out`.
fn export(out: &Path, args: Option<QuantArgs>) -> Result<(), CliError> {
    let model = ModelConfig::Llama(config());
    let mut tensors = Vec::new();
    for (i, spec) in model.linears().into_iter().enumerate() {
        let (n, k) = (spec.n(), spec.k());
        let data = weight(i as u64, n, k);
        tensors.push(match args {
            None => ExportTensor::Float {
                name: format!("{}.weight", spec.module),
                shape: spec.shape,
                data,
                dtype: FloatType::F32,
            },
            Some(args) => {
                let matrix = QuantizedMatrix::quantize(&data, n, k, args)
                    .map_err(|e| CliError::new(6, format!("fixed: {}: {e}", spec.module)))?;
                ExportTensor::Linear {
                    module: spec.module,
                    shape: spec.shape,
                    matrix,
                    activation: None,
                    source: None,
                    order: None,
                }
            }
        });
    }
    for (name, shape) in other_tensors() {
        let data = other(&name, &shape);
        tensors.push(ExportTensor::Float { name, shape, data, dtype: FloatType::F32 });
    }
    let scheme = args.map(|weights| QuantConfig {
        overrides: Vec::new(),
        scheme: QuantScheme { weights, activations: None },
        ignore: Vec::<Pattern>::new(),
        kv_cache: None,
        blocks: Vec::new(),
    });
    export_folder(out, &model, tensors, scheme.as_ref(), Vec::new(), true)?;
    Ok(())
}

fn other_tensors() -> Vec<(String, Vec<usize>)> {
    let c = config();
    let mut out = vec![("model.embed_tokens.weight".to_owned(), vec![c.vocab_size, c.hidden_size])];
    for i in 0..c.num_hidden_layers {
        out.push((format!("model.layers.{i}.input_layernorm.weight"), vec![c.hidden_size]));
        out.push((format!("model.layers.{i}.post_attention_layernorm.weight"), vec![c.hidden_size]));
    }
    out.push(("model.norm.weight".to_owned(), vec![c.hidden_size]));
    out
}

/// Runs the checks in the empty folder `dir`. `exported` is called with each exported folder before it is read back:
/// the tests plant faults there, the command does nothing.
///
/// # Errors
/// What exporting, reading or running refuses.
pub fn measure(dir: &Path, threads: usize, exported: &mut dyn FnMut(&str, &Path)) -> Result<Report, CliError> {
    let float = dir.join("float");
    export(&float, None)?;
    let float = Checkpoint::open(&float)?;
    let modules: Vec<String> = float.config().linears().into_iter().map(|l| l.module).collect();
    let reference = LlamaRuntime::load(&float, threads)?;
    let logits = |runtime: &LlamaRuntime, window: &[u32]| -> Result<Vec<f32>, CliError> {
        let mut cache = runtime.new_cache(window.len())?;
        Ok(runtime.forward(window, &mut cache, Logits::All)?)
    };
    let mut report = Report::new("fixed").about("recipe_sha256", identity()).about("seed", 0);
    for (name, args) in schemes() {
        let folder = dir.join(name);
        export(&folder, Some(args))?;
        exported(name, &folder);
        let packed = Checkpoint::open(&folder)?;
        let mut row = add_digests(Row::new(name), &packed)?;
        let check = requantize(&packed, &mut |module| {
            let index = modules.iter().position(|m| m == module).unwrap_or_default();
            let spec = &packed.config().linears()[index];
            Ok(weight(index as u64, spec.n(), spec.k()))
        })?;
        row = row.number("requantize_mismatches", check.mismatches as f64);
        if let Some(first) = check.first {
            row = row.text("first_mismatch", first);
        }
        let runtime = LlamaRuntime::load(&packed, threads)?;
        let metrics = evaluate_text::<CliError>(
            &tokens(),
            CONTEXT,
            &mut |w| logits(&runtime, w),
            Some(&mut |w| logits(&reference, w)),
        )?;
        let mut row = row.text_metrics(&metrics);
        // Compared by value: the windows are no sample of anything.
        row.samples = None;
        report.rows.push(row);
    }
    Ok(report)
}
