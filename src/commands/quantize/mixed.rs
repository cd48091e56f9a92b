//! `dsq quantize --target-bits`: which layers get which scheme. The measurement and the choice are dsq-train's `ptq`; this
//! reads the candidates and tells what came out.

use super::{Args, default_dtype, granularity, read_scheme, workers};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, printable};
use dsq_quant::{Pattern, QuantConfig, QuantScheme};
use dsq_train::ptq::{self, Calibration, Sensitivity};
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

/// Measures the candidates and gives each set of layers the one that the budget allows, as overrides of `config`.
pub(super) fn choose(
    args: &Args,
    global: &Global,
    ckpt: &Checkpoint,
    config: &mut QuantConfig,
    calibration: &Calibration,
    target: f64,
) -> Result<Mixed, CliError> {
    let given = &args.calibration.candidates;
    let candidates: Vec<String> =
        if given.is_empty() { USUAL.map(str::to_owned).to_vec() } else { given.iter().map(|c| c.to_owned()).collect() };
    let dtype = args.scale_dtype.or(default_dtype(ckpt)).unwrap_or_else(|| ckpt.main_dtype());
    let read = |c: &String| {
        let wrong = || {
            let got = printable(c);
            CliError::usage(format!("--candidates: expected SCHEME[:N|channel|tensor],..., got {got:?}"))
        };
        read_scheme(args, "--candidates", c, granularity(args)?, dtype)?.ok_or_else(wrong)
    };
    let schemes: Vec<QuantScheme> = candidates.iter().map(read).collect::<Result<_, _>>()?;
    if let Some(c) = schemes.iter().position(|s| s.activations != schemes[0].activations) {
        let problem =
            format!("expected candidates that treat activations alike, got {} and {}", candidates[0], candidates[c]);
        return Err(CliError::usage(format!("--candidates: {problem}")));
    }
    if let Some(c) = schemes.iter().position(|s| s.activations.is_some_and(|a| !a.is_dynamic())) {
        let problem = format!("expected candidates without static activations, got {}", candidates[c]);
        return Err(CliError::usage(format!("--candidates: {problem}")));
    }
    let bar = output::progress(1, "sensitivity {bar:30} {pos}/{len} {eta}");
    let mut on_progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let table = workers(global)?.install(|| ptq::sensitivity(ckpt, config, &schemes, calibration, &mut on_progress));
    bar.finish_and_clear();
    let table = table.map_err(|e| match e {
        dsq_train::TrainError::Quant { module, source } => {
            dsq_checkpoint::CheckpointError::quant(&args.model, super::source_name(ckpt, &module), source).into()
        }
        other => CliError::from(other),
    })?;
    let chosen = ptq::allocate(&table, target).map_err(|e| {
        CliError::usage(format!("--target-bits: {e}"))
            .with_hint("give a larger --target-bits or candidates of fewer bits: --candidates W2A16,W3A16,W4A16,W8A16")
    })?;
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
