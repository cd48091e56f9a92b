//! Any bytes as a safetensors file: a file whose tensors can all be read, or an error of exit code 3; never a panic. Not a
//! model folder (see `config.rs`, `folder.rs`).
#![no_main]

use dsq_checkpoint::SafetensorsFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match SafetensorsFile::open(&dsq_fuzz::file("f.safetensors", bytes)) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(file) => {
            for name in file.names() {
                assert!(file.info(name).is_some());
                file.read_stored(name).expect("a checked file reads");
                let _ = file.read_f32(name);
            }
        }
    }
});
