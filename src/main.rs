//! The `dsq` command: reads the command line, runs one command, turns its error into one line and an exit code.
//! What a command does is in `commands/`; this file is their table of contents and no library.

mod commands;
mod documents;
mod error;
mod input;
mod interrupt;
mod jobs;
mod output;
mod overlap;
mod pictures;
mod plan;
mod plot;
mod proof_logits;
mod recipe;
mod reference;
mod regress;
mod size;

use clap::{Parser, Subcommand};
use error::CliError;
use std::process::ExitCode;

/// Takes a neural network from float to INT4/FP8 and proves that nothing was lost on the way.
#[derive(Parser)]
#[command(name = "dsq", version, about, propagate_version = true)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options that every command takes.
#[derive(clap::Args, Clone, Debug)]
pub struct Global {
    /// Print one JSON object on stdout and nothing else there.
    #[arg(long, global = true)]
    pub json: bool,
    /// Worker threads (default: all cores). Results are the same bits for any number.
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<usize>,
    /// Where to run; this build knows `cpu`.
    #[arg(long, global = true, default_value = "cpu", value_name = "cpu|cuda:N")]
    pub device: String,
}

impl Global {
    /// The number of worker threads to use.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Sets the number of threads of the process-wide pool (training and kernels use it). The first call decides.
    pub fn use_threads(&self) {
        let _ = rayon::ThreadPoolBuilder::new().num_threads(self.threads()).build_global();
    }

    fn check(&self) -> Result<(), CliError> {
        if self.threads == Some(0) {
            return Err(CliError::usage("--threads: expected at least 1, got 0"));
        }
        dsq_kernels::Isa::check_max().map_err(CliError::usage)?;
        if self.device != "cpu" {
            return Err(CliError::new(
                5,
                format!("--device: this build runs on cpu only; expected cpu, got {}", self.device),
            )
            .with_hint("use --device cpu"));
        }
        Ok(())
    }
}

#[derive(Subcommand)]
enum Command {
    /// Train by a recipe: float, then QAT on the grid that ships; then export, run the export and evaluate.
    Train(commands::train::Args),
    /// Quantize a model after training (PTQ) and write a compressed-tensors folder.
    Quantize(commands::quantize::Args),
    /// Write a model in another format.
    Export(commands::export::Args),
    /// Show tensors, schemes and real bits per weight, and every fault found.
    Inspect(commands::inspect::Args),
    /// Measure perplexity, KL divergence and top-1 agreement.
    Eval(commands::eval::Args),
    /// Generate text.
    Run(commands::run::Args),
    /// Measure tokens per second and the share of the memory roofline.
    Bench(commands::bench::Args),
    /// Time each operation of a model, layer by layer, beside what the machine's rates predict.
    Profile(commands::profile::Args),
    /// Print the token ids of texts.
    Tokenize(commands::tokenize::Args),
    /// Put reports together: tables as Markdown, tables and plots as one page of HTML.
    Report(commands::report::Args),
    /// Run a regression suite against its committed baselines.
    Regress(commands::regress::Args),
    /// Show the CPU's features and which kernel each kind of layer will use.
    Doctor(commands::doctor::Args),
}

fn run(cli: Cli) -> Result<u8, CliError> {
    let global = &cli.global;
    global.check()?;
    match cli.command {
        Command::Train(args) => commands::train::run(args, global),
        Command::Quantize(args) => commands::quantize::run(args, global),
        Command::Export(args) => commands::export::run(args, global),
        Command::Inspect(args) => commands::inspect::run(args, global),
        Command::Eval(args) => commands::eval::run(args, global),
        Command::Run(args) => commands::run::run(args, global),
        Command::Bench(args) => commands::bench::run(args, global),
        Command::Profile(args) => commands::profile::run(args, global),
        Command::Tokenize(args) => commands::tokenize::run(args, global),
        Command::Report(args) => commands::report::run(args, global),
        Command::Regress(args) => commands::regress::run(args, global),
        Command::Doctor(args) => commands::doctor::run(args, global),
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // clap prints help and version itself; both end with 0, a usage error with 2.
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
    };
    let json = cli.global.json;
    // A panic is a bug of ours: it is reported as one line, with no backtrace, and exit code 70. The hook only keeps
    // its words, because the tokenizer's self test catches panics of a library on purpose.
    static LAST_PANIC: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());
    std::panic::set_hook(Box::new(|info| {
        if let Ok(mut last) = LAST_PANIC.lock() {
            *last = info.to_string();
        }
    }));
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(cli))) {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(e)) => {
            e.print(json);
            ExitCode::from(if e.code() == 130 { interrupt::exit_code() } else { e.code() })
        }
        Err(_) => {
            let words = LAST_PANIC.lock().map(|s| s.replace('\n', " ")).unwrap_or_default();
            error::complain(&format!("error: internal bug: {words}"));
            error::complain("hint: please report this with the command that caused it");
            ExitCode::from(70)
        }
    }
}
