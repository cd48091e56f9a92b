//! The settings of GPTQ and AWQ folders: `quantization_config` in `config.json`, and `quantize_config.json`, in which GPTQ tools keep
//! the same. Reads what the runtime can honour and refuses the rest by name; writes the keys of AutoGPTQ, GPTQModel and AutoAWQ.
//! Not the tensors (see `mod.rs`).

use super::{FolderFormat, shown};
use crate::CheckpointError;
use crate::config::fields::Fields;
use crate::quantization::{QuantizationConfig, QuantizationGroup, Target};
use dsq_quant::{FloatType, Granularity, Mapping, Pattern, QuantArgs, QuantType, WeightObserver};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Keys of GPTQ configs that change what a model computes in ways that dsq does not know; allowed when null, false or empty.
const GPTQ_FOREIGN: [&str; 6] =
    ["is_marlin_format", "adapter", "rotation", "preprocessors", "activation", "embedding_bits"];

/// Reads the settings of a GPTQ or AWQ folder.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key.
pub(crate) fn parse(f: &Fields, method: &str) -> Result<QuantizationConfig, CheckpointError> {
    if method == "awq" { parse_awq(f) } else { parse_gptq(f) }
}

fn parse_gptq(f: &Fields) -> Result<QuantizationConfig, CheckpointError> {
    // Older and newer tools call it differently.
    let format = match (f.string("checkpoint_format")?, f.string("format")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(f.error("format", format!("expected {a:?} as in checkpoint_format, got {b:?}")));
        }
        (a, b) => a.or(b).unwrap_or("gptq"),
    };
    let format = match format {
        "gptq" => FolderFormat::GptqV1,
        "gptq_v2" => FolderFormat::GptqV2,
        _ => return Err(f.error("checkpoint_format", format!("expected \"gptq\" or \"gptq_v2\", got {format:?}"))),
    };
    f.only("pack_dtype", &json!("int32"), "codes lie in words of 32 bits")?;
    for key in GPTQ_FOREIGN {
        let empty = |v: &Value| *v == Value::Bool(false) || v.as_object().is_some_and(Map::is_empty) || *v == json!([]);
        if let Some(v) = f.get(key).filter(|v| !empty(v)) {
            return Err(f.error(key, format!("not supported; expected null, got {}", shown(Some(v)))));
        }
    }
    let bits = f.required("bits", f.integer("bits", 1..=16))?;
    let qtype = QuantType::INTS.into_iter().find(|q| q.bits() as i64 == bits);
    let qtype = qtype.ok_or_else(|| f.error("bits", format!("expected 2, 3, 4 or 8, got {bits}")))?;
    let symmetric = f.boolean("sym")?.unwrap_or(true);
    let mut ignore = Vec::new();
    if !f.boolean("lm_head")?.unwrap_or(false) {
        ignore.push(Target::Text("lm_head".into()));
    }
    ignore.extend(left_out(f)?);
    let act_order = f.boolean("desc_act")?.unwrap_or(false);
    let targets = match f.list("modules_in_block_to_quantize")? {
        None => vec![Target::Text("Linear".into())],
        Some(lists) => {
            let names = lists.iter().flat_map(|l| l.as_array().map_or(std::slice::from_ref(l), Vec::as_slice));
            names
                .map(|v| v.as_str().map(|s| Target::Ending(s.to_owned())))
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| f.error("modules_in_block_to_quantize", "expected lists of names, got others"))?
        }
    };
    let mapping = if symmetric { Mapping::Symmetric } else { Mapping::Asymmetric };
    config(f, format, targets, ignore, qtype, mapping, act_order)
}

/// Modules that `dynamic` leaves in float (`"-:REGEX": {}`); settings of their own for some modules are refused.
fn left_out(f: &Fields) -> Result<Vec<Target>, CheckpointError> {
    let Some(dynamic) = f.get("dynamic") else { return Ok(Vec::new()) };
    let Value::Object(map) = dynamic else {
        return Err(f.error("dynamic", format!("expected an object, got {}", shown(Some(dynamic)))));
    };
    map.iter()
        .map(|(key, settings)| match key.strip_prefix("-:") {
            Some(regex) => {
                Pattern::new(&format!("re:{regex}")).map(Target::Regex).map_err(|e| f.error("dynamic", e.to_string()))
            }
            None => {
                let got = format!("{key:?}: {}", shown(Some(settings)));
                let problem = format!("one scheme for all; expected only modules left in float (\"-:...\"), got {got}");
                Err(f.error("dynamic", problem))
            }
        })
        .collect()
}

fn parse_awq(f: &Fields) -> Result<QuantizationConfig, CheckpointError> {
    for key in ["version", "format"] {
        if let Some(v) = f.string(key)?.filter(|v| !v.eq_ignore_ascii_case("gemm")) {
            return Err(f.error(key, format!("expected \"gemm\", got {v:?}")));
        }
    }
    if f.string("backend")? == Some("llm-awq") {
        return Err(f.error("backend", "expected the layout of AutoAWQ, got \"llm-awq\""));
    }
    // AutoAWQ's own names, and those of transformers.
    let bits = match f.integer("bits", 1..=16)? {
        Some(bits) => bits,
        None => f.required("w_bit", f.integer("w_bit", 1..=16))?,
    };
    if bits != 4 {
        return Err(f.error("bits", format!("expected 4 for AWQ, got {bits}")));
    }
    f.only("zero_point", &Value::Bool(true), "files of this version have zero points")?;
    let names = f.strings("modules_to_not_convert")?.unwrap_or_default();
    let mut ignore: Vec<Target> = names.into_iter().map(Target::Part).collect();
    ignore.push(Target::Text("lm_head".into()));
    let targets = vec![Target::Text("Linear".into())];
    config(f, FolderFormat::Awq, targets, ignore, QuantType::Int4, Mapping::Asymmetric, false)
}

fn config(
    f: &Fields,
    format: FolderFormat,
    targets: Vec<Target>,
    ignore: Vec<Target>,
    qtype: QuantType,
    mapping: Mapping,
    act_order: bool,
) -> Result<QuantizationConfig, CheckpointError> {
    let key = if f.has("group_size") || !f.has("q_group_size") { "group_size" } else { "q_group_size" };
    let granularity = match f.integer(key, -1..=1 << 30)?.unwrap_or(128) {
        -1 => Granularity::PerChannel,
        0 => return Err(f.error(key, "expected -1 (a scale for each output) or at least 1, got 0")),
        g => Granularity::PerGroup(g as usize),
    };
    let weights =
        QuantArgs { qtype, granularity, mapping, scale_dtype: FloatType::F32, observer: WeightObserver::MinMax };
    let texts = |targets: &[Target]| targets.iter().map(Target::text).collect::<Vec<_>>();
    let (target_texts, ignore_texts) = (texts(&targets), texts(&ignore));
    let name = if format == FolderFormat::Awq { "awq" } else { "gptq" };
    let group = QuantizationGroup { name: name.into(), target_texts, targets, weights, activations: None, act_order };
    Ok(QuantizationConfig { groups: vec![group], ignore, ignore_texts, kv_cache: None, format, scale_inv: false })
}

/// Refuses a `quantize_config.json` that says another thing than `config.json`: tools read one or the other.
///
/// # Errors
/// [`CheckpointError::Invalid`] with both values.
pub(crate) fn same_settings(
    config: &QuantizationConfig,
    other: &QuantizationConfig,
    file: &Path,
) -> Result<(), CheckpointError> {
    let said = |q: &QuantizationConfig| -> [(&'static str, String); 5] {
        let w = q.groups.first().map(|g| g.weights);
        let head = q.ignore_texts.iter().any(|t| t == "lm_head");
        [
            ("checkpoint_format", q.format.name().to_owned()),
            ("bits", w.map_or(0, |w| w.qtype.bits()).to_string()),
            (
                "group_size",
                match w.map(|w| w.granularity) {
                    Some(Granularity::PerGroup(g)) => g.to_string(),
                    _ => "-1".into(),
                },
            ),
            ("sym", w.is_some_and(|w| w.mapping == Mapping::Symmetric).to_string()),
            ("lm_head", (!head).to_string()),
        ]
    };
    for ((key, expected), (_, got)) in said(config).into_iter().zip(said(other)) {
        if expected != got {
            let problem = format!("differs from quantization_config in config.json; expected {expected}, got {got}");
            return Err(CheckpointError::invalid(file, key, problem));
        }
    }
    let act_order = |q: &QuantizationConfig| q.groups.iter().any(|g| g.act_order);
    let (expected, got) = (act_order(config), act_order(other));
    if expected != got {
        let problem = format!("differs from quantization_config in config.json; expected {expected}, got {got}");
        return Err(CheckpointError::invalid(file, "desc_act", problem));
    }
    Ok(())
}

/// The value of `quantization_config`, for GPTQ also the content of `quantize_config.json`: one scheme for all quantized modules;
/// `float` are the linear modules that stay in float, without the head, and `act_order` says whether groups are no runs of inputs.
pub(crate) fn to_value(format: FolderFormat, args: &QuantArgs, act_order: bool, head: bool, float: &[String]) -> Value {
    let group_size = match args.granularity {
        Granularity::PerGroup(g) => g as i64,
        _ => -1,
    };
    if format == FolderFormat::Awq {
        let kept: Vec<&str> = float.iter().map(String::as_str).chain(["lm_head"]).collect();
        return json!({
            "quant_method": "awq",
            "bits": args.qtype.bits(),
            "group_size": group_size,
            "zero_point": true,
            "version": "gemm",
            "modules_to_not_convert": kept,
        });
    }
    let mut value = json!({
        "quant_method": "gptq",
        "checkpoint_format": if format == FolderFormat::GptqV2 { "gptq_v2" } else { "gptq" },
        "bits": args.qtype.bits(),
        "group_size": group_size,
        "sym": args.mapping == Mapping::Symmetric,
        "desc_act": act_order,
        "static_groups": false,
        "true_sequential": true,
        "lm_head": head,
        "pack_dtype": "int32",
        "meta": {"quantizer": [format!("dsq:{}", env!("CARGO_PKG_VERSION"))]},
    });
    if !float.is_empty() {
        let entry = |m: &String| (format!("-:^{}$", m.replace('.', "\\.")), json!({}));
        value["dynamic"] = Value::Object(float.iter().map(entry).collect());
    }
    value
}
