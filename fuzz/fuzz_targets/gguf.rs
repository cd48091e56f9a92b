//! Any bytes as a GGUF file: a model whose tensors, tokenizer and template can be asked for, or an error; never a panic. Not
//! the numbers that come out (see the golden tests).
#![no_main]

use dsq_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Checkpoint::open(&dsq_fuzz::file("f.gguf", bytes)) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(model) => {
            for name in model.names() {
                let _ = model.read_f32(&name);
            }
            let _ = model.aux_files();
            model.faults();
        }
    }
});
