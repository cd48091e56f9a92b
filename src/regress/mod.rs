//! What a regression suite measures: the fixed-input checks, recipes and models, each as a report with the digests of its
//! export. Comparing and judging is in `dsq-eval`; the command line is in `commands/regress.rs`.

pub mod bisect;
pub mod digest;
pub mod fixed;
pub mod golden;
pub mod history;
pub mod model;
pub mod other;
#[cfg(test)]
mod planted;
pub mod recipe;
pub mod setup;
