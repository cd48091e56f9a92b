//! Options that say which keys and values stay in the cache. Not what they do (see `dsq_runtime::KvPolicy`).

use crate::error::CliError;
use dsq_runtime::KvPolicy;

/// Attention sinks where --sinks is not given.
const SINKS: usize = 4;
/// Of the budget of `entropy`, the last positions where --kv-recent is not given: one in so many.
const RECENT: usize = 4;

/// The policy of the cache of keys and values.
#[derive(clap::Args, Debug, Clone)]
pub struct PolicyArgs {
    /// Which keys and values stay in the cache: `full`: all; `window`: the first (--sinks) and the last (--kv-budget); `entropy`: in each
    /// layer the first, the last (--kv-recent) and those that the last tokens gave most attention.
    #[arg(long, value_enum, default_value_t = PolicyArg::Full, value_name = "POLICY")]
    kv_policy: PolicyArg,
    #[command(flatten)]
    sizes: PolicySizes,
}

/// How much a policy keeps.
#[derive(clap::Args, Debug, Clone)]
pub struct PolicySizes {
    /// Positions that the policy keeps: of `window` the last ones that a token sees, its own among them; of `entropy` on average over the
    /// layers, to which 64 more come before they are pruned.
    #[arg(long, value_name = "N")]
    pub kv_budget: Option<u32>,
    /// Positions at the beginning that stay (attention sinks) [default: 4].
    #[arg(long, value_name = "N")]
    pub sinks: Option<u32>,
    /// Of `entropy`, positions at the end that stay [default: a quarter of --kv-budget].
    #[arg(long, value_name = "N")]
    pub kv_recent: Option<u32>,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyArg {
    Full,
    Window,
    Entropy,
}

impl PolicyArgs {
    /// The policy that was asked for.
    ///
    /// # Errors
    /// Exit code 2 for an option that the policy does not use or lacks, and for numbers that make no sense.
    pub fn policy(&self) -> Result<KvPolicy, CliError> {
        let PolicySizes { kv_budget, sinks, kv_recent } = &self.sizes;
        let refused = |options: &[(&str, &Option<u32>)], expected: &str, got: &str| {
            options.iter().find(|(_, value)| value.is_some()).map_or(Ok(()), |(name, _)| {
                Err(CliError::usage(format!("{name}: expected --kv-policy {expected}, got {got}")))
            })
        };
        let policy = match self.kv_policy {
            PolicyArg::Full => {
                refused(&[("--kv-budget", kv_budget), ("--sinks", sinks)], "window or entropy", "full")?;
                refused(&[("--kv-recent", kv_recent)], "entropy", "full")?;
                KvPolicy::Full
            }
            PolicyArg::Window => {
                refused(&[("--kv-recent", kv_recent)], "entropy", "window")?;
                self.sizes.window()?
            }
            PolicyArg::Entropy => self.sizes.entropy()?,
        };
        policy.check()?;
        Ok(policy)
    }
}

impl PolicySizes {
    /// The policy `window` of these sizes.
    ///
    /// # Errors
    /// Exit code 2 where --kv-budget is not given.
    pub fn window(&self) -> Result<KvPolicy, CliError> {
        Ok(KvPolicy::Window { sinks: self.sinks(), window: self.budget()? })
    }

    /// The policy `entropy` of these sizes.
    ///
    /// # Errors
    /// As [`PolicySizes::window`].
    pub fn entropy(&self) -> Result<KvPolicy, CliError> {
        let budget = self.budget()?;
        let recent = self.kv_recent.map_or((budget / RECENT).max(1), |n| n as usize);
        Ok(KvPolicy::Entropy { budget, sinks: self.sinks(), recent })
    }

    /// The name of a size that was given.
    pub fn given(&self) -> Option<&'static str> {
        let all = [("--kv-budget", self.kv_budget), ("--sinks", self.sinks), ("--kv-recent", self.kv_recent)];
        all.into_iter().find_map(|(name, value)| value.map(|_| name))
    }

    fn sinks(&self) -> usize {
        self.sinks.map_or(SINKS, |n| n as usize)
    }

    fn budget(&self) -> Result<usize, CliError> {
        match self.kv_budget {
            Some(n) => Ok(n as usize),
            None => Err(CliError::usage("--kv-budget: expected the positions that the policy keeps, got none")),
        }
    }
}
