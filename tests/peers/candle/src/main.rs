//! Prompt and decode tokens a second of candle's quantized llama: `candle-bench FILE.gguf PROMPT GENERATE`. A peer to measure beside,
//! no part of dsq.

use candle_core::{Device, Error, Result, Tensor, quantized::gguf_file};
use candle_transformers::models::quantized_llama::ModelWeights;
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, prompt, generate] = &arguments[..] else {
        return Err(Error::Msg("usage: candle-bench FILE.gguf PROMPT GENERATE".into()));
    };
    let number = |text: &String| text.parse::<usize>().map_err(|e| Error::Msg(format!("{text}: {e}")));
    let (prompt, generate, device) = (number(prompt)?, number(generate)?, Device::Cpu);
    let mut reader = std::fs::File::open(file)?;
    let content = gguf_file::Content::read(&mut reader)?;
    let mut model = ModelWeights::from_gguf(content, &mut reader, &device)?;
    let mut run = |ids: &[u32], at: usize| -> Result<u32> {
        let logits = model.forward(&Tensor::new(ids, &device)?.unsqueeze(0)?, at)?;
        logits.squeeze(0)?.argmax(0)?.to_scalar::<u32>()
    };
    let ids: Vec<u32> = (0..prompt as u32).map(|i| i * 37 % 40_000 + 10).collect();
    run(&ids, 0)?; // Warm up.
    let start = Instant::now();
    let mut next = run(&ids, 0)?;
    let prompt_rate = prompt as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for i in 0..generate {
        next = run(&[next], prompt + i)?;
    }
    println!("{prompt_rate:.1} {:.1}", generate as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
