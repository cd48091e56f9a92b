//! Training: QAT on the grid that ships, and run folders that survive a kill; post-training quantization with calibration
//! data. Takes plain settings, returns plain results and reports progress through a callback; it prints nothing and knows
//! no recipe file.

mod adamw;
pub mod cnn;
mod error;
pub mod idx;
mod lm;
mod progress;
pub mod ptq;
pub mod qat;
mod random;
mod run_dir;
mod schedule;

pub use adamw::{AdamW, NamedGradients, ParamGroup};
pub use cnn::{CnnTrainConfig, run_cnn};
pub use error::TrainError;
pub use lm::{
    Adapters, Distill, InputRanges, LearnedScales, LmOutcome, LmPhase, LmTrainConfig, Phase, Progress, StepTimes,
    observe_inputs, time_steps, train_lm,
};
pub use progress::Control;
pub use run_dir::{RunDir, Snapshot, StateTensor};
