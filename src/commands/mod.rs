//! One file a command: its options, and `run`, which returns the exit code (0, or 1 when a gate failed).

pub mod bench;
mod bisect;
pub mod doctor;
pub mod eval;
pub mod eval_images;
mod eval_kv;
pub mod eval_tasks;
pub mod export;
pub mod inspect;
mod policy;
pub mod profile;
pub mod quantize;
pub mod regress;
pub mod report;
pub mod run;
pub mod tokenize;
pub mod train;

use crate::error::CliError;
use dsq_checkpoint::Checkpoint;
use dsq_runtime::{Activations, KvPolicy, KvPool, KvType, LlamaRuntime};
use policy::PolicyArgs;

/// How a language model runs: options of every command that runs one.
#[derive(clap::Args, Debug, Clone)]
pub struct RuntimeArgs {
    /// What linear layers multiply with: `float` (W4A16), or `int8`, which rounds their inputs to eight bits, each run of at most 16
    /// with a scale of its own (W4A8). Inputs that the checkpoint stores a grid for are on that grid either way.
    #[arg(long, value_enum, default_value_t = ActivationsArg::Float, value_name = "MODE")]
    activations: ActivationsArg,
    /// How keys and values are held where the checkpoint stores no grid for them.
    #[arg(long, value_enum, default_value_t = KvArg::F16, value_name = "TYPE")]
    kv_type: KvArg,
    #[command(flatten)]
    policy: PolicyArgs,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationsArg {
    Float,
    Int8,
}

impl From<ActivationsArg> for Activations {
    fn from(a: ActivationsArg) -> Self {
        match a {
            ActivationsArg::Float => Self::Float,
            ActivationsArg::Int8 => Self::Int8,
        }
    }
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvArg {
    F32,
    F16,
    /// Codes of eight bits, a scale for the key and one for the value of each position and head
    Int8,
    /// FP8 E4M3 with the same scales
    Fp8,
}

impl From<KvArg> for KvType {
    fn from(k: KvArg) -> Self {
        match k {
            KvArg::F32 => Self::F32,
            KvArg::F16 => Self::F16,
            KvArg::Int8 => Self::Int8,
            KvArg::Fp8 => Self::Fp8,
        }
    }
}

impl RuntimeArgs {
    /// Loads the model in the mode that was asked for, after a check of the policy.
    pub fn load(&self, checkpoint: &Checkpoint, threads: usize) -> Result<LlamaRuntime, CliError> {
        LlamaRuntime::check_policy(checkpoint, self.policy()?)?;
        Ok(LlamaRuntime::load(checkpoint, threads)?.with_activations(self.activations.into()))
    }

    /// The form of keys and values.
    pub fn kv_type(&self) -> KvType {
        self.kv_type.into()
    }

    /// Which keys and values stay.
    pub fn policy(&self) -> Result<KvPolicy, CliError> {
        self.policy.policy()
    }

    /// Memory for `sequences`, each of at most `len` positions, which may come in one step.
    pub fn new_pool(&self, model: &LlamaRuntime, sequences: usize, len: usize) -> Result<KvPool, CliError> {
        let policy = self.policy()?;
        let positions = sequences * policy.blocks(len, len) * KvPool::block_len();
        Ok(model.new_pool(positions, len, self.kv_type(), policy)?)
    }

    /// `float` or `int8`.
    pub fn activations_name(&self) -> &'static str {
        match self.activations {
            ActivationsArg::Float => "float",
            ActivationsArg::Int8 => "int8",
        }
    }
}
