//! Any bytes as a file of log-likelihood requests, plain or gzip: items, or an error; never a panic. Not the scores (see `tests/golden/tasks`).
#![no_main]

use dsq_eval::TaskFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(e) = TaskFile::read(&dsq_fuzz::file("f.jsonl", bytes), Some(1000)) {
        assert_eq!(e.exit_code(), 3, "{e}");
    }
});
