//! `quantization_config`: which module is quantized and how. Reads what it can run and refuses the rest by name; writes what the
//! Python package compressed-tensors accepts. Not the tensors (see `packed.rs`), not the keys of GPTQ and AWQ (see
//! `columns/config.rs`).

use crate::CheckpointError;
use crate::columns::{self, FolderFormat};
use crate::config::fields::{Fields, show};
use crate::kv_cache;
use crate::packed::DiskFormat;
use dsq_quant::{FloatType, Granularity, Mapping, Pattern, QuantArgs, QuantType, WeightObserver};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The format of a file whose groups have several, each named in its group.
const MIXED_PRECISION: &str = "mixed-precision";

/// A parsed `quantization_config`.
#[derive(Debug, Clone)]
pub struct QuantizationConfig {
    /// The groups, in the order of the file.
    pub groups: Vec<QuantizationGroup>,
    /// Modules to leave in float.
    pub(crate) ignore: Vec<Target>,
    /// The texts of `ignore`.
    pub ignore_texts: Vec<String>,
    /// How a KV cache holds keys and values; `None`: in float.
    pub kv_cache: Option<QuantArgs>,
    /// How the folder stores codes.
    pub format: FolderFormat,
    /// Whether scales are called `weight_scale_inv`, as in the FP8 folders of DeepSeek (they are multiplied with all the same).
    pub scale_inv: bool,
}

/// Modules that share a scheme.
#[derive(Debug, Clone)]
pub struct QuantizationGroup {
    /// Name of the group, `group_0`.
    pub name: String,
    /// The texts of the targets.
    pub target_texts: Vec<String>,
    pub(crate) targets: Vec<Target>,
    /// The weights; `scale_dtype` is F32 here unless it is one byte: the stored scale's own dtype decides.
    pub weights: QuantArgs,
    /// Input activations, static or for each token.
    pub activations: Option<QuantArgs>,
    /// Whether groups may lie in another order than the inputs (`desc_act` of GPTQ, `"actorder": "group"`).
    pub act_order: bool,
}

/// A target or ignore entry.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// A class name or a full module name.
    Text(String),
    /// A regular expression anchored at the start.
    Regex(Pattern),
    /// The last parts of a module name.
    Ending(String),
    /// Any part of a module name, as AutoAWQ looks for it.
    Part(String),
}

impl Target {
    fn matches(&self, module: &str, class: &str) -> bool {
        match self {
            Target::Text(t) => t == module || t == class,
            Target::Regex(p) => p.matches(module),
            Target::Ending(t) => module.strip_suffix(t.as_str()).is_some_and(|head| head.ends_with('.')),
            Target::Part(t) => module.contains(t.as_str()),
        }
    }

    /// As it was written.
    pub(crate) fn text(&self) -> String {
        match self {
            Target::Text(t) | Target::Ending(t) | Target::Part(t) => t.clone(),
            Target::Regex(p) => p.text().to_owned(),
        }
    }
}

impl QuantizationConfig {
    /// The group that quantizes `module` of class `class` (`Linear` or `Conv2d`); `None` when it stays in float. An
    /// exact name goes before an expression, an expression before a class, as in the Python package.
    pub fn group_for(&self, module: &str, class: &str) -> Option<&QuantizationGroup> {
        if self.ignore.iter().any(|t| t.matches(module, class)) {
            return None;
        }
        let rank = |g: &QuantizationGroup| {
            let of = |t: &Target| match t {
                Target::Text(t) if t == module => 0,
                Target::Regex(_) | Target::Ending(_) | Target::Part(_) => 1,
                Target::Text(_) => 2,
            };
            g.targets.iter().filter(|t| t.matches(module, class)).map(of).min()
        };
        self.groups.iter().filter_map(|g| rank(g).map(|r| (r, g))).min_by_key(|(r, _)| *r).map(|(_, g)| g)
    }

    /// Reads the value of the key `quantization_config`.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key.
    pub(crate) fn from_value(value: &Value, file: &Path) -> Result<Self, CheckpointError> {
        let f = Fields::new(value, file, "quantization_config")?;
        let method = f.required("quant_method", f.string("quant_method"))?;
        match method {
            "compressed-tensors" => {}
            "gptq" | "awq" => return columns::parse(&f, method),
            "fp8" => return fp8_blocks(&f),
            _ => {
                let expected = "expected \"compressed-tensors\", \"gptq\", \"awq\" or \"fp8\"";
                return Err(f.error("quant_method", format!("{expected}, got {method:?}")));
            }
        }
        let format = f.required("format", f.string("format"))?;
        let status = f.string("quantization_status")?.unwrap_or("compressed");
        if status != "compressed" {
            return Err(f.error("quantization_status", format!("expected \"compressed\", got {status:?}")));
        }
        for key in ["sparsity_config", "moe_sparsity_config", "transform_config"] {
            if let Some(v) = f.get(key).filter(|v| !v.as_object().is_some_and(Map::is_empty)) {
                return Err(f.error(key, format!("not supported; expected null, got {}", show(v))));
            }
        }
        let ignore_texts = f.strings("ignore")?.unwrap_or_default();
        let ignore = targets(&f, "ignore", &ignore_texts)?;
        let groups = f.required("config_groups", Ok(f.get("config_groups")))?;
        let Value::Object(groups) = groups else {
            return Err(f.error("config_groups", format!("expected an object, got {}", show(groups))));
        };
        if groups.is_empty() {
            return Err(f.error("config_groups", "expected at least one group, got 0"));
        }
        let groups = groups
            .iter()
            .map(|(name, v)| QuantizationGroup::from_value(name, v, file, format))
            .collect::<Result<Vec<_>, _>>()?;
        let kv_cache = f.get(kv_cache::KEY).map(|v| kv_cache::from_value(v, file)).transpose()?;
        f.refuse_the_rest(&["version", "global_compression_ratio", "run_compressed", "dequantize"])?;
        let format = FolderFormat::CompressedTensors;
        Ok(Self { groups, ignore, ignore_texts, kv_cache, format, scale_inv: false })
    }

    /// Reads a `quantize_config.json`, which older tools write without a method.
    ///
    /// # Errors
    /// As [`QuantizationConfig::from_value`].
    pub(crate) fn from_quantize_config(value: &Value, file: &Path) -> Result<Self, CheckpointError> {
        let f = Fields::new(value, file, "")?;
        match f.string("quant_method")?.unwrap_or("gptq") {
            method @ ("gptq" | "awq") => columns::parse(&f, method),
            method => Err(f.error("quant_method", format!("expected \"gptq\" or \"awq\", got {method:?}"))),
        }
    }

    /// The value of `quantization_config` for groups of explicitly named modules: schemes of weights and inputs, and whether the
    /// weights' groups are in activation order.
    ///
    /// # Errors
    /// Never for what this crate writes; a scheme that compressed-tensors cannot name is a usage error.
    pub(crate) fn to_value(
        groups: &[(QuantArgs, Option<QuantArgs>, bool, Vec<String>)],
        ignore: &[String],
        kv_cache: Option<&QuantArgs>,
    ) -> Value {
        let mut map = Map::new();
        let format_of = |w: &QuantArgs, a: &Option<QuantArgs>| DiskFormat::of(w, a.as_ref()).map(DiskFormat::name);
        let mut format = groups.first().and_then(|(w, a, ..)| format_of(w, a));
        if groups.iter().any(|(w, a, ..)| format_of(w, a) != format) {
            format = Some(MIXED_PRECISION);
        }
        for (i, (weights, activations, act_order, modules)) in groups.iter().enumerate() {
            let mut of_weights = args_value(weights);
            if *act_order {
                of_weights["actorder"] = json!("group");
            }
            let group = json!({
                "targets": modules,
                "weights": of_weights,
                "input_activations": activations.as_ref().map(args_value),
                "output_activations": null,
                "format": format_of(weights, activations),
            });
            map.insert(format!("group_{i}"), group);
        }
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "global_compression_ratio": null,
            "kv_cache_scheme": kv_cache::to_value(kv_cache),
            "ignore": ignore,
            "config_groups": map,
        })
    }
}

/// The config of DeepSeek's FP8 folders: E4M3 in blocks of 128 x 128. What they say of activations (quantized by the servers' own
/// kernels, in runs of 128 of a token) is not done here: inputs stay in float.
fn fp8_blocks(f: &Fields) -> Result<QuantizationConfig, CheckpointError> {
    f.only("fmt", &json!("e4m3"), "the only FP8 codes of such folders")?;
    f.only("activation_scheme", &json!("dynamic"), "scales of activations are not read")?;
    f.required("weight_block_size", Ok(f.get("weight_block_size")))?;
    f.only("weight_block_size", &json!([128, 128]), "the only blocks of such folders")?;
    if let Some(other) = f.string("scale_fmt")?.filter(|s| !["ue8m0", "float"].contains(s)) {
        return Err(f.error("scale_fmt", format!("expected \"ue8m0\" or \"float\", got {other:?}")));
    }
    let mut ignore_texts = f.strings("modules_to_not_convert")?.unwrap_or_default();
    let mut ignore: Vec<Target> = ignore_texts.iter().cloned().map(Target::Part).collect();
    // Never converted, and named by nobody.
    ignore.push(Target::Text("lm_head".into()));
    ignore_texts.push("lm_head".into());
    f.refuse_the_rest(&[])?;
    let target_texts = vec!["Linear".to_owned()];
    let group = QuantizationGroup {
        name: "fp8".into(),
        targets: targets(f, "targets", &target_texts)?,
        target_texts,
        weights: QuantArgs::fp8(Granularity::PerBlock(128, 128), FloatType::F32),
        activations: None,
        act_order: false,
    };
    let format = FolderFormat::CompressedTensors;
    Ok(QuantizationConfig { groups: vec![group], ignore, ignore_texts, kv_cache: None, format, scale_inv: true })
}

impl QuantizationGroup {
    fn from_value(name: &str, value: &Value, file: &Path, default_format: &str) -> Result<Self, CheckpointError> {
        let path = format!("quantization_config.config_groups.{name}");
        let f = Fields::new(value, file, &path)?;
        let target_texts = f.required("targets", f.strings("targets"))?;
        let targets = targets(&f, "targets", &target_texts)?;
        let weights = f.required("weights", Ok(f.get("weights")))?;
        let of_weights = Fields::new(weights, file, &f.path("weights"))?;
        let act_order = of_weights.get("actorder").is_some_and(|v| *v == "group" || *v == "dynamic" || *v == true);
        let weights = parse_args(&of_weights, false)?;
        let activations = match f.get("input_activations") {
            None => None,
            Some(v) => Some(parse_args(&Fields::new(v, file, &f.path("input_activations"))?, true)?),
        };
        let format = f.string("format")?.unwrap_or(default_format);
        let expected = DiskFormat::of(&weights, activations.as_ref()).filter(|d| !d.is_called(format));
        if let Some(expected) = expected {
            let key = if f.has("format") { f.path("format") } else { "quantization_config.format".into() };
            let problem =
                format!("expected {:?} for {} weights, got {format:?}", expected.name(), weights.qtype.name());
            return Err(CheckpointError::invalid(file, key, problem));
        }
        if let Some(v) = f.get("output_activations") {
            return Err(f.error("output_activations", format!("not supported; expected null, got {}", show(v))));
        }
        f.refuse_the_rest(&[])?;
        Ok(Self { name: name.into(), target_texts, targets, weights, activations, act_order })
    }
}

fn targets(f: &Fields, key: &str, texts: &[String]) -> Result<Vec<Target>, CheckpointError> {
    texts
        .iter()
        .map(|t| {
            if t.starts_with("re:") {
                Pattern::new(t).map(Target::Regex).map_err(|e| f.error(key, e.to_string()))
            } else {
                Ok(Target::Text(t.clone()))
            }
        })
        .collect()
}

/// `QuantizationArgs` of one tensor.
pub(crate) fn parse_args(f: &Fields, activation: bool) -> Result<QuantArgs, CheckpointError> {
    let bits = f.integer("num_bits", 1..=16)?.unwrap_or(8);
    let kind = f.string("type")?.unwrap_or("int");
    let qtype = match (kind, bits) {
        ("int", 2) => QuantType::Int2,
        ("int", 3) => QuantType::Int3,
        ("int", 4) => QuantType::Int4,
        ("int", 8) => QuantType::Int8,
        ("int", _) => return Err(f.error("num_bits", format!("expected 2, 3, 4 or 8, got {bits}"))),
        ("float", 4) => QuantType::Fp4E2M1,
        ("float", 8) => QuantType::Fp8E4M3,
        ("float", _) => return Err(f.error("num_bits", format!("expected 4 or 8 for type \"float\", got {bits}"))),
        _ => return Err(f.error("type", format!("expected \"int\" or \"float\", got {kind:?}"))),
    };
    let mapping = match f.boolean("symmetric")? {
        Some(false) => Mapping::Asymmetric,
        _ => Mapping::Symmetric,
    };
    let group_size = f.integer("group_size", -1..=1 << 30)?;
    let strategy = f.string("strategy")?.unwrap_or(match group_size {
        None => "tensor",
        Some(-1) => "channel",
        Some(_) => "group",
    });
    let granularity = match (strategy, group_size) {
        ("tensor", None) => Granularity::PerTensor,
        ("channel", None | Some(-1)) => Granularity::PerChannel,
        ("token", None) if activation => Granularity::PerToken,
        ("group", Some(g)) if g > 0 && activation => Granularity::PerTokenGroup(g as usize),
        ("group", Some(g)) if g > 0 => Granularity::PerGroup(g as usize),
        ("tensor_group", Some(g)) if g > 0 && qtype == QuantType::Fp4E2M1 && activation => {
            Granularity::PerTokenGroup(g as usize)
        }
        ("tensor_group", Some(g)) if g > 0 && qtype == QuantType::Fp4E2M1 => Granularity::PerGroup(g as usize),
        ("group" | "tensor_group", g) => {
            let got = g.map_or("nothing".into(), |g| g.to_string());
            return Err(f.error("group_size", format!("expected at least 1 for strategy {strategy:?}, got {got}")));
        }
        ("block", None) => block_of(f)?,
        ("tensor" | "channel" | "block" | "token", Some(g)) if activation || strategy != "token" => {
            return Err(f.error("group_size", format!("expected null for strategy {strategy:?}, got {g}")));
        }
        _ => {
            let known = "\"tensor\", \"channel\", \"group\", \"tensor_group\" or \"block\"";
            return Err(f.error("strategy", format!("expected {known}, got {strategy:?}")));
        }
    };
    let dynamic = matches!(granularity, Granularity::PerToken | Granularity::PerTokenGroup(_));
    if activation && !dynamic && granularity != Granularity::PerTensor {
        let problem = format!(
            "expected \"tensor\", \"token\", \"group\" or \"tensor_group\" for input activations, got {strategy:?}"
        );
        return Err(f.error("strategy", problem));
    }
    if dynamic && strategy == "tensor_group" {
        f.only("dynamic", &Value::String("local".into()), "only the global scale is stored")?;
    } else if dynamic {
        if f.boolean("dynamic")? != Some(true) {
            let got = f.get("dynamic").map_or("nothing".into(), show);
            return Err(f.error("dynamic", format!("expected true for strategy {strategy:?}, got {got}")));
        }
    } else {
        f.only("dynamic", &Value::Bool(false), "scales are static")?;
    }
    if !matches!(granularity, Granularity::PerBlock(..)) {
        f.only("block_structure", &Value::Null, "the strategy is not \"block\"")?;
    }
    match f.get("actorder") {
        None | Some(Value::Bool(false)) => {}
        Some(Value::String(s)) if s == "weight" || s == "static" => {}
        // Only codes of integers in groups have an order of their own.
        Some(v) if !activation && (*v == "group" || *v == "dynamic" || *v == true) => {
            if qtype.float().is_some() || !matches!(granularity, Granularity::PerGroup(_)) {
                let expected = "expected no such order but of integers in groups (strategy \"group\")";
                return Err(f.error("actorder", format!("{expected}, got {} for strategy {strategy:?}", show(v))));
            }
        }
        Some(v) => {
            let known = "null, \"weight\", \"static\", \"group\" or \"dynamic\"";
            return Err(f.error("actorder", format!("expected {known}, got {}", show(v))));
        }
    }
    // Where the scales came from; another observer than dsq's own changes nothing that is read here.
    let observer = match f.string("observer")? {
        Some("mse") => WeightObserver::Mse,
        _ => WeightObserver::MinMax,
    };
    let scale_dtype = match (qtype, strategy) {
        (QuantType::Fp4E2M1, "tensor_group") => FloatType::F8E4M3,
        (QuantType::Fp4E2M1, _) => FloatType::F8E8M0,
        _ => FloatType::F32,
    };
    // Scales that are found when the model runs are f32, others have the dtype in which they are stored.
    let allowed = match scale_dtype_name(scale_dtype) {
        Some(name) => vec![name],
        None if dynamic => vec!["torch.float32"],
        None => vec!["torch.float32", "torch.float16", "torch.bfloat16"],
    };
    let plain = |name: &str| name.trim_start_matches("torch.").to_owned();
    if let Some(got) = f.string("scale_dtype")?.filter(|got| allowed.iter().all(|a| plain(a) != plain(got))) {
        let expected = allowed.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(" or ");
        return Err(f.error("scale_dtype", format!("expected {expected} for strategy {strategy:?}, got {got:?}")));
    }
    f.refuse_the_rest(&["observer_kwargs", "zp_dtype"])?;
    let args = QuantArgs { qtype, granularity, mapping, scale_dtype, observer };
    args.check().map_err(|e| f.error("strategy", e.to_string()))?;
    Ok(args)
}

/// `block_structure`: rows and columns of a block.
fn block_of(f: &Fields) -> Result<Granularity, CheckpointError> {
    let list = f.required("block_structure", f.list("block_structure"))?;
    let sizes: Vec<usize> = list.iter().filter_map(|v| v.as_u64()?.try_into().ok()).collect();
    match sizes[..] {
        [rows, columns] if list.len() == 2 && rows > 0 && columns > 0 => Ok(Granularity::PerBlock(rows, columns)),
        _ => {
            let got = show(&Value::Array(list.to_vec()));
            Err(f.error("block_structure", format!("expected two positive numbers, got {got}")))
        }
    }
}

/// How a config spells a scale dtype that it must name.
fn scale_dtype_name(dtype: FloatType) -> Option<&'static str> {
    match dtype {
        FloatType::F32 | FloatType::F16 | FloatType::Bf16 => None,
        FloatType::F8E4M3 => Some("torch.float8_e4m3fn"),
        FloatType::F8E8M0 => Some("torch.uint8"),
    }
}

/// `QuantizationArgs` as a config has them.
pub(crate) fn args_value(args: &QuantArgs) -> Value {
    let (strategy, group_size) = match args.granularity {
        Granularity::PerTensor => ("tensor", None),
        Granularity::PerChannel => ("channel", None),
        Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) if args.has_global_scale() => {
            ("tensor_group", Some(g))
        }
        Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => ("group", Some(g)),
        Granularity::PerBlock(..) => ("block", None),
        Granularity::PerToken => ("token", None),
    };
    let mut value = json!({
        "num_bits": args.qtype.bits(),
        "type": if args.qtype.float().is_some() { "float" } else { "int" },
        "symmetric": args.mapping == Mapping::Symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": match args.granularity {
            Granularity::PerTokenGroup(_) if args.has_global_scale() => json!("local"),
            _ => json!(args.is_dynamic()),
        },
        "observer": match args.observer {
            _ if args.is_dynamic() => None,
            WeightObserver::MinMax => Some("minmax"),
            WeightObserver::Mse => Some("mse"),
        },
    });
    if let Granularity::PerBlock(rows, columns) = args.granularity {
        value["block_structure"] = json!([rows, columns]);
    }
    if let Some(name) = scale_dtype_name(args.scale_dtype) {
        value["scale_dtype"] = json!(name);
    }
    value
}
