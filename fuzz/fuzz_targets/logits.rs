//! Any bytes as a file of a reference's logits: rows, or an error; never a panic. Not their values (see the tests of `dsq-eval`).
#![no_main]

use dsq_eval::{LogitsOf, LogitsReader, Window};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let of = LogitsOf { model_sha256: "m".into(), tokens_sha256: "t".into(), context: 4, stride: 4, vocab: 20 };
    if let Ok(mut reader) = LogitsReader::new(bytes, &of) {
        while reader.window(&Window::of(&[1, 2, 3])).is_ok_and(|logits| logits.len() == 60) {}
    }
});
