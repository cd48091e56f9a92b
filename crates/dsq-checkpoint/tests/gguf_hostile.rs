//! Random damage to GGUF files: cut anywhere, bits flipped anywhere. Opening and reading give a model or an error of a known
//! kind; never a panic, and never more memory than the bytes present warrant (the process may not reserve 1 GiB).

mod gguf_writer;

use gguf_writer::*;
use proptest::prelude::*;
use std::sync::OnceLock;

fn valid() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let quantized = |t: &mut Tensor| (t.ty, t.data) = (Q8_0, [&[0, 0x38][..], &[7; 32]].concat().repeat(32));
        toy_with_tokenizer().text("tokenizer.chat_template", "{{ x }}").change("blk.0.ffn_up.weight", quantized).bytes()
    })
}

/// Opens, and if that works reads everything.
fn use_all(bytes: &[u8]) {
    match open(bytes) {
        Err(e) => assert_eq!(e.exit_code(), 3, "{e}"),
        Ok((file, _folder)) => {
            for name in file.names() {
                if let Err(e) = file.read_f32(&name) {
                    assert_eq!(e.exit_code(), 6, "{e}");
                }
            }
            if let Err(e) = file.aux_files() {
                assert_eq!(e.exit_code(), 3, "{e}");
            }
            file.faults();
        }
    }
}

/// The tests below, again in a process whose address space is limited.
#[test]
fn nothing_is_allocated_by_a_claimed_size() {
    const CHILD: &str = "DSQ_TEST_HOSTILE_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    let status = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 1048576; exec \"$0\" --test-threads 1 f073 f070"])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn f073_every_cut_of_the_header_is_refused() {
    let bytes = valid();
    let header = bytes.len() - bytes.len() % 32;
    for len in (0..2400).chain((2400..header).step_by(101)) {
        refused(&bytes[..len]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn f070_flipped_bits_never_panic(flips in prop::collection::vec((0usize..2600, 0u8..8), 1..6)) {
        let mut bytes = valid().to_vec();
        for (at, bit) in flips {
            bytes[at] ^= 1 << bit;
        }
        use_all(&bytes);
    }

    #[test]
    fn f070_overwritten_words_never_panic(at in 0usize..2600, word in prop_oneof![any::<u64>(), Just(u64::MAX), Just(1 << 63), 0u64..300], cut in any::<prop::sample::Index>()) {
        let mut bytes = valid().to_vec();
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        use_all(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        use_all(&bytes);
    }

    #[test]
    fn f070_random_bytes_after_the_header_never_panic(tail in prop::collection::vec(any::<u8>(), 0..300), counts in (0u64..4, 0u64..4)) {
        let head = [b"GGUF\x03\0\0\0", &counts.0.to_le_bytes()[..], &counts.1.to_le_bytes(), &tail].concat();
        use_all(&head);
    }
}
