//! Any bytes as a PyTorch file: an error of exit code 3, or a model whose tensors can be asked for; never a panic. Not the
//! numbers that come out.
#![no_main]

use dsq_checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("f.pth");
    std::fs::write(&path, bytes).expect("room in the temporary folder");
    match Checkpoint::open(&path) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok(model) => {
            for name in model.names() {
                let _ = model.read_f32(&name);
            }
            model.faults();
        }
    }
});
