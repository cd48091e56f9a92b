//! `dsq eval`.

use crate::{Global, error::CliError};

/// Options of `dsq eval`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<u8, CliError> {
    Err(CliError::usage("eval: this command is being built"))
}
