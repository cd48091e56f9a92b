//! `dsq inspect`.

use crate::{Global, error::CliError};

/// Options of `dsq inspect`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<u8, CliError> {
    Err(CliError::usage("inspect: this command is being built"))
}
