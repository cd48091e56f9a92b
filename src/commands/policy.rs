//! Options that say which keys and values stay in the cache. Not what they do (see `dsq_runtime::KvPolicy`).

use crate::error::CliError;
use dsq_runtime::KvPolicy;

/// Attention sinks where --sinks is not given.
const SINKS: usize = 4;

/// The policy of the cache of keys and values.
#[derive(clap::Args, Debug, Clone)]
pub struct PolicyArgs {
    /// Which keys and values stay in the cache: all, or those of the first positions (--sinks) and the last (--kv-budget).
    #[arg(long, value_enum, default_value_t = PolicyArg::Full, value_name = "POLICY")]
    kv_policy: PolicyArg,
    /// Of --kv-policy window, the last positions that a token sees, its own among them.
    #[arg(long, value_name = "N")]
    kv_budget: Option<u32>,
    /// Of --kv-policy window, positions at the beginning that stay (attention sinks) [default: 4].
    #[arg(long, value_name = "N")]
    sinks: Option<u32>,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyArg {
    Full,
    Window,
}

impl PolicyArgs {
    /// The policy that was asked for.
    ///
    /// # Errors
    /// Exit code 2 for an option that the policy does not use or lacks, and for numbers that make no sense.
    pub fn policy(&self) -> Result<KvPolicy, CliError> {
        let number = |x: Option<u32>| x.map(|n| n as usize);
        let policy = match self.kv_policy {
            PolicyArg::Full => {
                let given = [("--kv-budget", self.kv_budget), ("--sinks", self.sinks)];
                if let Some((name, _)) = given.iter().find(|(_, value)| value.is_some()) {
                    return Err(CliError::usage(format!("{name}: expected --kv-policy window, got full")));
                }
                KvPolicy::Full
            }
            PolicyArg::Window => {
                let Some(window) = number(self.kv_budget) else {
                    return Err(CliError::usage("--kv-budget: expected the positions of --kv-policy window, got none"));
                };
                KvPolicy::Window { sinks: number(self.sinks).unwrap_or(SINKS), window }
            }
        };
        policy.check()?;
        Ok(policy)
    }
}
