//! One file a command: its options, and `run`, which returns the exit code (0, or 1 when a gate failed).

pub mod bench;
pub mod doctor;
pub mod eval;
mod eval_images;
pub mod export;
pub mod inspect;
pub mod quantize;
pub mod regress;
pub mod run;
pub mod tokenize;
pub mod train;
