//! Any text as a tokenizer.json: a tokenizer that encodes and decodes a few texts, or an error; never a panic that leaves the
//! reader. Not the ids that come out (see the golden tests).
#![no_main]

use dsq_runtime::{Specials, TextTokenizer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    // The reader catches the panics of the library that it calls, which is its promise; libFuzzer's own hook would end the
    // process at the first.
    let read = std::panic::catch_unwind(|| {
        if let Ok(tokenizer) = TextTokenizer::from_json(bytes, "tokenizer.json") {
            for text in ["", "Hello  world\n", "<s>\u{1f642}e\u{301}"] {
                if let Ok(ids) = tokenizer.encode(text, Specials::AsText) {
                    let _ = tokenizer.decode(&ids);
                }
            }
        }
    });
    if read.is_err() {
        eprintln!("a panic left the reader");
        std::process::abort();
    }
});
