//! Any text as the config.json of a folder with one small weight file: a model, or an error of exit code 3; never a panic.
//! Not the weight file (see `safetensors.rs`).
#![no_main]

use dsq_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("config.json"), bytes).expect("room in the temporary folder");
    let header = br#"{"lm_head.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}   "#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    std::fs::write(folder.path().join("model.safetensors"), file).expect("room in the temporary folder");
    match Checkpoint::open(folder.path()) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(model) => {
            model.faults();
        }
    }
});
