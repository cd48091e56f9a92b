//! Any text as the config.json of a folder with one small weight file: a model, or an error of exit code 3; never a panic.
//! Not the weight file (see `safetensors.rs`).
#![no_main]

use dsq_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|bytes: &[u8]| {
    static WEIGHTS: OnceLock<()> = OnceLock::new();
    WEIGHTS.get_or_init(|| {
        let header = br#"{"lm_head.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}   "#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        dsq_fuzz::file("model.safetensors", &file);
    });
    dsq_fuzz::file("config.json", bytes);
    match Checkpoint::open(dsq_fuzz::folder()) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(model) => {
            model.faults();
        }
    }
});
