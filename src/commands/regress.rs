//! `dsq regress`.

use crate::{Global, error::CliError};

/// Options of `dsq regress`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<u8, CliError> {
    Err(CliError::usage("regress: this command is being built"))
}
