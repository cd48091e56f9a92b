//! Training: QAT on the grid that ships, and run folders that survive a kill. Takes plain settings, returns plain
//! results and reports progress through a callback; it prints nothing and knows no recipe file.

mod error;
mod run_dir;

pub use error::TrainError;
pub use run_dir::{RunDir, Snapshot, StateTensor};
