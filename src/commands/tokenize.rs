//! `dsq tokenize`: the token ids that a model's tokenizer gives to texts, to compare with other tools.

use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, printable};
use dsq_runtime::{Specials, TextTokenizer};
use serde_json::json;
use std::path::PathBuf;

/// Options of `dsq tokenize`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model folder or a GGUF file.
    model: PathBuf,
    /// A JSON file that holds a list of strings.
    #[arg(long, value_name = "FILE", required_unless_present = "text")]
    file: Option<PathBuf>,
    /// A text (may be given several times, after those of --file).
    #[arg(long, value_name = "TEXT")]
    text: Vec<String>,
    /// Treat the texts of special tokens (such as <|im_end|>) as text, as `dsq run` does with a prompt.
    #[arg(long)]
    literal: bool,
}

/// Prints a JSON list of id lists, one for each text.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let mut texts: Vec<String> = Vec::new();
    if let Some(file) = &args.file {
        let name = printable(&file.to_string_lossy());
        let bytes = std::fs::read(file).map_err(|e| CliError::new(4, format!("{name}: cannot read: {e}")))?;
        texts = serde_json::from_slice(&bytes)
            .map_err(|e| CliError::usage(format!("{name}: expected a JSON list of strings, got: {e}")))?;
    }
    texts.extend(args.text);
    let tokenizer = TextTokenizer::new(&Checkpoint::open(&args.model)?)?;
    let specials = if args.literal { Specials::AsText } else { Specials::Parse };
    let ids = texts.iter().map(|t| tokenizer.encode(t, specials)).collect::<Result<Vec<_>, _>>()?;
    // With --json the answer is an object, as for every command.
    output::line(if global.json { json!({ "ids": ids }).to_string() } else { json!(ids).to_string() });
    Ok(0)
}
