//! Metrics with confidence intervals, reports, baselines and verdicts.
//!
//! This crate knows no model and runs none: it takes logits (or a closure that makes them), and it compares numbers
//! with numbers. How each number is defined stands beside the function that computes it; `docs/evaluation.md`
//! collects the definitions.

mod baseline;
mod bootstrap;
mod error;
mod hardware;
mod images;
mod junit;
mod logits;
mod padding;
mod report;
mod run;
mod samples;
mod sequential;
mod suite;
mod task_metrics;
mod tasks;
mod text;
mod verdict;

pub use baseline::{BASELINE_FORMAT, Baseline, BaselineRow, Seeds, Setup, student};
pub use bootstrap::{BOOTSTRAP_SEED, Estimate, RESAMPLES, bootstrap_interval};
pub use error::EvalError;
pub use hardware::Hardware;
pub use images::{ImageEval, ImageMetrics, wilson};
pub use junit::junit;
pub use logits::{LogitsOf, LogitsReader, LogitsWriter};
pub use padding::{Padding, padding};
pub use report::{REPORT_FORMAT, Report, Row, table};
pub use run::{Ask, Identity, Job, Outcome, Purpose, run_suite};
pub use samples::Samples;
pub use sequential::FIRST_LOOK;
pub use suite::{
    Activations, BASE_ROW, Fixed, GoldenSets, Suite, SuiteModel, SuiteRecipe, Tolerance, Tolerances, Variant, Version,
    tolerance_of,
};
pub use task_metrics::{Answer, TaskMetrics, TokenScore, task_metrics, token_scores};
pub use tasks::{Item, Request, TaskFile};
pub use text::{Divergence, TextEval, TextMetrics, Window, evaluate_text, strided, windows};
pub use verdict::{Check, Direction, Verdict, compare, decided, direction};
