//! What each part of a model does to the logits: parts of BAD are put into GOOD, and those of GOOD into BAD, and the text runs through.
//! Groups of parts that do nothing are dropped together, so that one layer among many takes a logarithm of runs. Not how the parts
//! differ (see `compare.rs`).

use crate::error::CliError;
use crate::reference::forward;
use dsq_eval::{TextEval, Window};
use dsq_runtime::{KvType, LlamaRuntime, ModelPart};

/// A KL divergence below this is what the rounding of f64 leaves.
pub const NOTHING: f64 = 1e-13;

/// Parts with a smaller share of the change are not looked into.
const LEAST_SHARE: f64 = 0.01;

/// What a run of the text gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Mean KL divergence to GOOD, nats.
    pub kl: f64,
    /// Perplexity.
    pub perplexity: f64,
}

/// Parts that are exchanged together, under one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Unit {
    /// A module, a tensor or a layer.
    pub name: String,
    /// What is exchanged.
    pub part: ModelPart,
}

/// What a unit does.
#[derive(Debug, Clone, PartialEq)]
pub struct Effect {
    /// The unit.
    pub unit: Unit,
    /// KL divergence of GOOD with BAD's unit, over that of BAD.
    pub damage: f64,
    /// The share of BAD's KL divergence that is gone with GOOD's unit in it; below 0 where it gets worse. `None`: not measured.
    pub repair: Option<f64>,
    /// Perplexity of GOOD with BAD's unit.
    pub perplexity: f64,
}

/// Two models in memory, the text, and what GOOD says of it.
pub struct Walk<'a> {
    good: LlamaRuntime,
    bad: LlamaRuntime,
    windows: &'a [Window<'a>],
    wanted: Vec<Vec<f32>>,
    /// GOOD as it is (divergence 0).
    pub before: Measured,
    /// BAD as it is.
    pub after: Measured,
    /// Runs of the text so far.
    pub runs: usize,
    most: usize,
}

impl<'a> Walk<'a> {
    /// Runs both models. At most `most` runs are made in all.
    ///
    /// # Errors
    /// What running refuses, logits that are not finite.
    pub fn new(
        good: LlamaRuntime,
        bad: LlamaRuntime,
        windows: &'a [Window<'a>],
        most: usize,
    ) -> Result<Self, CliError> {
        let wanted =
            windows.iter().map(|w| forward((&good, KvType::F32), w.tokens)).collect::<Result<Vec<_>, CliError>>()?;
        let nothing = Measured { kl: 0.0, perplexity: f64::NAN };
        let mut walk = Self { good, bad, windows, wanted, before: nothing, after: nothing, runs: 1, most };
        let mut eval = TextEval::new();
        for (w, logits) in windows.iter().zip(&walk.wanted) {
            eval.add(w, logits, None)?;
        }
        walk.before.perplexity = eval.finish()?.perplexity.value;
        walk.after = walk.measure(false)?;
        Ok(walk)
    }

    /// Whether BAD gives other logits than GOOD, beyond rounding in the sum.
    pub fn differs(&self) -> bool {
        self.after.kl > NOTHING
    }

    /// Whether runs are left.
    pub fn may_run(&self) -> bool {
        self.runs < self.most
    }

    fn measure(&mut self, good: bool) -> Result<Measured, CliError> {
        self.runs += 1;
        let model = if good { &self.good } else { &self.bad };
        let mut eval = TextEval::new();
        for (w, wanted) in self.windows.iter().zip(&self.wanted) {
            eval.add(w, &forward((model, KvType::F32), w.tokens)?, Some(wanted))?;
        }
        let m = eval.finish()?;
        Ok(Measured { kl: m.kl.map_or(0.0, |kl| kl.value), perplexity: m.perplexity.value })
    }

    fn exchange(&mut self, units: &[Unit]) -> Result<(), CliError> {
        for u in units {
            self.good.exchange(&mut self.bad, u.part)?;
        }
        Ok(())
    }

    /// GOOD with BAD's `units`.
    ///
    /// # Errors
    /// As [`Walk::new`].
    pub fn damaged(&mut self, units: &[Unit]) -> Result<Measured, CliError> {
        self.exchange(units)?;
        let measured = self.measure(true);
        self.exchange(units)?;
        measured
    }

    /// BAD with GOOD's `units`.
    ///
    /// # Errors
    /// As [`Walk::new`].
    pub fn repaired(&mut self, units: &[Unit]) -> Result<Measured, CliError> {
        self.exchange(units)?;
        let measured = self.measure(false);
        self.exchange(units)?;
        measured
    }

    /// The effects of the units that do something, the largest first. Groups are halved, the one that does most first, until what is left
    /// does less than a hundredth of the change, or runs are spent; `each`: every unit alone from the start.
    ///
    /// # Errors
    /// As [`Walk::new`].
    pub fn effects(&mut self, units: &[Unit], each: bool) -> Result<Vec<Effect>, CliError> {
        let total = self.after.kl;
        let mut groups: Vec<(Measured, Vec<Unit>)> = Vec::new();
        let first: Vec<Vec<Unit>> = match each {
            true => units.iter().map(|u| vec![u.clone()]).collect(),
            false => vec![units.to_vec()],
        };
        for group in first.into_iter().filter(|g| !g.is_empty()) {
            if self.may_run() {
                groups.push((self.damaged(&group)?, group));
            }
        }
        let mut out = Vec::new();
        while let Some(at) = (0..groups.len()).max_by(|a, b| groups[*a].0.kl.total_cmp(&groups[*b].0.kl)) {
            let (m, group) = groups.swap_remove(at);
            if m.kl <= LEAST_SHARE * total {
                break;
            }
            if let [unit] = &group[..] {
                let (damage, perplexity) = (m.kl / total, m.perplexity);
                out.push(Effect { unit: unit.clone(), damage, repair: None, perplexity });
                continue;
            }
            for half in [&group[..group.len() / 2], &group[group.len() / 2..]] {
                if self.may_run() {
                    groups.push((self.damaged(half)?, half.to_vec()));
                }
            }
        }
        Ok(out)
    }

    /// Measures what putting GOOD's unit into BAD gains.
    ///
    /// # Errors
    /// As [`Walk::new`].
    pub fn add_repair(&mut self, effect: &mut Effect) -> Result<(), CliError> {
        if self.may_run() {
            let units = [effect.unit.clone()];
            effect.repair = Some(1.0 - self.repaired(&units)?.kl / self.after.kl);
        }
        Ok(())
    }
}

/// Every part of a model, as units named by layer.
pub fn layers(count: usize) -> Vec<Unit> {
    let layer = |i: usize| Unit { name: format!("model.layers.{i}"), part: ModelPart::Layer(i) };
    let embedding = Unit { name: "model.embed_tokens".into(), part: ModelPart::Embedding };
    let output = Unit { name: "model.norm and lm_head".into(), part: ModelPart::Output };
    std::iter::once(embedding).chain((0..count).map(layer)).chain([output]).collect()
}
