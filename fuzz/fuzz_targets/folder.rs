//! Any config.json beside any weight file, so that the readers of packed layers (compressed-tensors, GPTQ, AWQ) see tensors that
//! disagree with it: the input is the config, a zero byte, and the weight file. A model whose layers can be asked for, or an
//! error; never a panic. Not the two files alone (see `config.rs`, `safetensors.rs`).
#![no_main]

use dsq_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some(split) = bytes.iter().position(|&b| b == 0) else { return };
    dsq_fuzz::file("config.json", &bytes[..split]);
    dsq_fuzz::file("model.safetensors", &bytes[split + 1..]);
    match Checkpoint::open(dsq_fuzz::folder()) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(model) => {
            for linear in model.config().linears() {
                let _ = model.linear(&linear.module);
                let _ = model.bias(&linear.module);
                let _ = model.input_grid(&linear.module);
            }
            model.faults();
        }
    }
});
