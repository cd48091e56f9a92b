//! `dsq quantize --target-bits`: which layers get which scheme. The measurement and the choice are dsq-train's `ptq`; this
//! reads the candidates and tells what came out.

use super::{Args, Run, default_dtype, granularity, read_scheme, workers};
use crate::{error::CliError, output};
use dsq_checkpoint::{Checkpoint, ModelConfig, check_groups, printable};
use dsq_quant::{Pattern, QuantConfig, QuantScheme};
use dsq_train::ptq::{self, Calibration, Journal, Sensitivity};
use serde_json::{Value, json};

/// What is written beside the model.
pub(super) const FILE: &str = "dsq-sensitivity.json";
/// Candidates unless told otherwise: what servers have kernels for.
const USUAL: [&str; 2] = ["W4A16", "W8A16"];

/// What was chosen.
pub(super) struct Mixed {
    target: f64,
    candidates: Vec<String>,
    table: Vec<Sensitivity>,
    chosen: Vec<usize>,
}

/// The candidates with their names; none without `--target-bits`.
///
/// # Errors
/// Exit code 2 for names that are no scheme, for schemes that treat activations differently or put them on stored grids, and for
/// `--scheme` beside them.
pub(super) fn candidates(args: &Args, ckpt: &Checkpoint) -> Result<Vec<(String, QuantScheme)>, CliError> {
    if args.calibration.target_bits.is_none() {
        return Ok(Vec::new());
    }
    if let Some(scheme) = &args.scheme {
        let problem = "--target-bits chooses among --candidates; expected no --scheme";
        return Err(CliError::usage(format!("--scheme: {problem}, got {scheme}"))
            .with_hint("name the schemes to choose from: --candidates W4A8,W8A8"));
    }
    let given = &args.calibration.candidates;
    let names: Vec<String> = if given.is_empty() { USUAL.map(str::to_owned).to_vec() } else { given.clone() };
    let dtype = args.scale_dtype.or(default_dtype(ckpt)).unwrap_or_else(|| ckpt.main_dtype());
    let read = |name: String| {
        let wrong = || {
            let got = printable(&name);
            CliError::usage(format!("--candidates: expected SCHEME[:N|channel|tensor],..., got {got:?}"))
        };
        let scheme = read_scheme(args, "--candidates", &name, granularity(args)?, dtype)?.ok_or_else(wrong)?;
        Ok((name, scheme))
    };
    let found: Vec<(String, QuantScheme)> = names.into_iter().map(read).collect::<Result<_, CliError>>()?;
    if let Some((name, _)) = found.iter().find(|(_, s)| s.activations != found[0].1.activations) {
        let problem = format!("expected candidates that treat activations alike, got {} and {name}", found[0].0);
        return Err(CliError::usage(format!("--candidates: {problem}")));
    }
    if let Some((name, _)) = found.iter().find(|(_, s)| s.activations.is_some_and(|a| !a.is_dynamic())) {
        let problem = format!("expected candidates without stored grids of activations, got {name}");
        return Err(CliError::usage(format!("--candidates: {problem}")));
    }
    Ok(found)
}

/// What shapes alone can tell: whether every candidate fits every layer, and the budget the least of them.
///
/// # Errors
/// Exit code 2.
pub(super) fn check(
    args: &Args,
    model: &ModelConfig,
    config: &QuantConfig,
    candidates: &[(String, QuantScheme)],
    target: f64,
) -> Result<(), CliError> {
    for (_, scheme) in candidates {
        check_groups(&args.model, model, &QuantConfig { scheme: *scheme, ..config.clone() })?;
    }
    let (mut weights, mut least) = (0.0, 0.0);
    for spec in model.linears().iter().filter(|l| config.is_common(&l.module)) {
        let (n, k) = (spec.n(), spec.k());
        let mut bits = f64::INFINITY;
        for (name, scheme) in candidates {
            let of = scheme.weights.bits_per_weight(n, k);
            bits = bits.min(of.map_err(|e| CliError::usage(format!("--candidates: {name}: {e}")))?);
        }
        weights += (n * k) as f64;
        least += bits * (n * k) as f64;
    }
    if weights == 0.0 {
        let problem = "every layer is ignored or has a scheme by --override; expected one to choose for, got none";
        return Err(CliError::usage(format!("--target-bits: {problem}")));
    }
    if least > target * weights * (1.0 + 1e-9) {
        let least = least / weights;
        let problem = format!("expected at least {least:.4}, the fewest that the candidates allow, got {target}");
        return Err(CliError::usage(format!("--target-bits: {problem}")).with_hint(
            "give a larger --target-bits or candidates of fewer bits: --candidates W2A16,W3A16,W4A16,W8A16",
        ));
    }
    Ok(())
}

/// Measures the candidates and gives each set of layers the one that the budget allows, as overrides of `config`.
pub(super) fn choose(
    run: &Run,
    config: &mut QuantConfig,
    calibration: &Calibration,
    journal: Option<&Journal>,
    target: f64,
) -> Result<Mixed, CliError> {
    let Run { args, global, ckpt, .. } = *run;
    let (candidates, schemes): (Vec<String>, Vec<QuantScheme>) = run.candidates.iter().cloned().unzip();
    let bar = output::progress(1, "sensitivity {bar:30} {pos}/{len} {eta}");
    let mut on_progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let search = || ptq::sensitivity(ckpt, config, &schemes, calibration, journal, &mut on_progress);
    let table = workers(global)?.install(search);
    bar.finish_and_clear();
    let table = table.map_err(|e| match e {
        dsq_train::TrainError::Quant { module, source } => {
            dsq_checkpoint::CheckpointError::quant(&args.model, super::source_name(ckpt, &module), source).into()
        }
        other => CliError::from(other),
    })?;
    let chosen = ptq::allocate(&table, target).map_err(|e| CliError::usage(format!("--target-bits: {e}")))?;
    for (s, &c) in table.iter().zip(&chosen) {
        for module in &s.modules {
            let pattern = Pattern::new(module).map_err(|e| CliError::new(70, format!("{module}: {e}")))?;
            config.overrides.push((pattern, schemes[c]));
        }
    }
    Ok(Mixed { target, candidates, table, chosen })
}

impl Mixed {
    fn weights(&self) -> f64 {
        self.table.iter().map(|s| s.weights as f64).sum()
    }

    /// Bits per weight over all sets of layers, and the sum of their divergences.
    fn result(&self) -> (f64, f64) {
        let of = self.table.iter().zip(&self.chosen);
        let (bits, kl) = of.fold((0.0, 0.0), |(bits, kl), (s, &c)| {
            (bits + s.choices[c].bits * s.weights as f64, kl + s.choices[c].divergence)
        });
        (bits / self.weights().max(1.0), kl)
    }

    /// The table, for the file beside the model and `--json`.
    pub(super) fn about(&self) -> Value {
        let rows: Vec<Value> = self
            .table
            .iter()
            .zip(&self.chosen)
            .map(|(s, &c)| {
                let choices: Vec<Value> = self
                    .candidates
                    .iter()
                    .zip(&s.choices)
                    .map(|(name, x)| json!({"scheme": name, "bits_per_weight": x.bits, "kl": x.divergence}))
                    .collect();
                json!({"modules": s.modules, "weights": s.weights, "choices": choices, "chosen": self.candidates[c]})
            })
            .collect();
        let (bits, kl) = self.result();
        json!({"target_bits": self.target, "bits_per_weight": bits, "sum_of_kl": kl, "layers": rows})
    }

    /// For a person.
    pub(super) fn notes(&self) -> Vec<String> {
        let (bits, kl) = self.result();
        let counts = self.candidates.iter().enumerate().map(|(i, name)| {
            let weights: f64 =
                self.table.iter().zip(&self.chosen).filter(|(_, c)| **c == i).map(|(s, _)| s.weights as f64).sum();
            format!("{name} {:.1}%", 100.0 * weights / self.weights().max(1.0))
        });
        let counts: Vec<String> = counts.collect();
        let mut out = vec![format!(
            "mixed precision: {bits:.4} of {} bits per weight ({} of the weights); divergences add up to {kl:.4} by rounding",
            self.target,
            counts.join(", ")
        )];
        for (i, name) in self.candidates.iter().enumerate() {
            let alone: f64 = self.table.iter().map(|s| s.choices[i].divergence).sum();
            out.push(format!("  all at {name}: {alone:.4}"));
        }
        let first = |s: &Sensitivity| s.choices.first().map_or(0.0, |c| c.divergence);
        if let Some(s) = self.table.iter().max_by(|a, b| first(a).total_cmp(&first(b))) {
            let (name, kl) = (&self.candidates[0], first(s));
            out.push(format!("  most sensitive: {} ({kl:.4} at {name}); all in {FILE}", s.modules.join(", ")));
        }
        out
    }
}
