//! Any bytes as a PyTorch file: an error of exit code 3, or a file whose tensors can all be read; never a panic. Not the
//! numbers that come out.
#![no_main]

use dsq_checkpoint::{Checkpoint, read_pytorch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = dsq_fuzz::file("f.pth", bytes);
    if let Err(e) = read_pytorch(&path) {
        assert_eq!(e.exit_code(), 3, "{e}");
    }
    // Other formats by content, and a model that is none that dsq knows.
    if let Err(e) = Checkpoint::open(&path) {
        assert_eq!(e.exit_code(), 3, "{e}");
    }
});
