//! `dsq run`.

use crate::{Global, error::CliError};

/// Options of `dsq run`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<u8, CliError> {
    Err(CliError::usage("run: this command is being built"))
}
