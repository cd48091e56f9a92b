//! Hostile and damaged safetensors files. The right answer is always an error that names the file and the field, with
//! the exit code of its class; never a panic.

mod fixtures;

use dsq_checkpoint::{Checkpoint, CheckpointError, NamedTensor, SafetensorsFile, TensorData, write_safetensors};
use fixtures::{f32_file, raw_file};
use proptest::prelude::*;
use std::path::Path;

fn open(bytes: &[u8]) -> Result<SafetensorsFile, CheckpointError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    std::fs::write(&path, bytes).unwrap();
    SafetensorsFile::open(&path)
}

/// Asserts exit code 3 and that the message holds all of `words`.
fn refused(bytes: &[u8], words: &[&str]) {
    match open(bytes) {
        Ok(_) => panic!("accepted; expected an error with {words:?}"),
        Err(e) => {
            let text = e.to_string();
            assert_eq!(e.exit_code(), 3, "{text}");
            assert!(text.contains("x.safetensors") && !text.contains('\n'), "{text}");
            for word in words {
                assert!(text.contains(word), "{text:?} lacks {word:?}");
            }
        }
    }
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"t":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn f001_files_shorter_than_the_length_field() {
    refused(b"", &["needs 8 bytes", "0 bytes"]);
    refused(b"1234567", &["needs 8 bytes", "7 bytes"]);
}

#[test]
fn f002_header_lengths_that_are_too_large() {
    for length in [1u64 << 63, u64::MAX, 100_000_001] {
        refused(&length.to_le_bytes(), &["header length", "100000000", &length.to_string()]);
    }
}

#[test]
fn f003_a_header_longer_than_the_file() {
    refused(&[100u64.to_le_bytes().as_slice(), b"{}"].concat(), &["expected at most 2 bytes", "got 100"]);
}

#[test]
fn f004_headers_that_are_no_object() {
    refused(&raw_file("", b""), &["header", "JSON object"]);
    for text in ["null", "[]", "\"x\"", "1"] {
        refused(&raw_file(text, b""), &["header", "JSON object"]);
    }
}

#[test]
fn f005_encodings_and_padding_of_the_header() {
    let mut bytes = raw_file("{\"aa\":{}}", b"");
    bytes[11] = 0xff;
    refused(&bytes, &["UTF-8"]);
    refused(&raw_file("\u{feff}{}", b""), &["JSON object"]);
    refused(&raw_file("{}\0\0\0", b""), &["header"]);
    refused(&raw_file("{} x", b""), &["header"]);
    assert_eq!(open(&raw_file("   {}", b"")).unwrap().names().count(), 0);
    assert_eq!(open(&raw_file("{}    ", b"")).unwrap().names().count(), 0);
}

#[test]
fn f006_deep_and_large_headers() {
    refused(&raw_file(&format!("{{\"a\":{}", "[".repeat(100_000)), b""), &["a"]);
    refused(&raw_file(&format!("{{\"__metadata__\":{}", "{\"a\":".repeat(100_000)), b""), &["__metadata__"]);
    let spaces = " ".repeat(10 << 20);
    assert!(open(&raw_file(&format!("{spaces}{{}}"), b"")).is_ok());
    let many: Vec<String> = (0..50_000).map(|i| format!("t{i}")).collect();
    let list: Vec<(&str, usize)> = many.iter().map(|n| (n.as_str(), 0)).collect();
    assert_eq!(open(&f32_file(&list)).unwrap().names().count(), 50_000);
    let entry = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    let million: Vec<String> = (0..1_000_000).map(|i| format!("\"{i}\":{entry}")).collect();
    refused(&raw_file(&format!("{{{}}}", million.join(",")), b""), &["at most 131072 tensors"]);
}

#[test]
fn f007_a_tensor_listed_twice() {
    let one = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let two = r#"{"dtype":"I32","shape":[1],"data_offsets":[0,4]}"#;
    refused(&raw_file(&format!(r#"{{"t":{one},"t":{two}}}"#), &[0; 4]), &["t:"]);
    let later = r#"{"dtype":"I32","shape":[1],"data_offsets":[4,8]}"#;
    refused(&raw_file(&format!(r#"{{"t":{one},"t":{later}}}"#), &[0; 8]), &["t:", "listed twice"]);
    let empty = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    refused(&raw_file(&format!(r#"{{"t":{empty},"t":{empty}}}"#), b""), &["t:", "listed twice"]);
}

#[test]
fn f008_a_key_of_an_entry_twice_or_unknown() {
    refused(
        &raw_file(r#"{"t":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}"#, &[0; 4]),
        &["t:", "dtype listed twice"],
    );
    refused(
        &raw_file(r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}}"#, &[0; 4]),
        &["t:", "strides"],
    );
    refused(&raw_file(r#"{"t":{"dtype":"F32","shape":[1]}}"#, &[0; 4]), &["t:", "data_offsets"]);
    refused(&raw_file(r#"{"__metadata__":{},"__metadata__":{}}"#, b""), &["twice"]);
}

#[test]
fn f009_overlapping_ranges_name_both() {
    let text = r#"{"first":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"second":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    refused(&raw_file(text, &[0; 12]), &["second", "overlaps first"]);
}

#[test]
fn f010_holes_and_trailing_bytes() {
    refused(&raw_file(&entry("\"F32\"", "[1]", "[4,8]"), &[0; 8]), &["hole", "from 0"]);
    let text = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    refused(&raw_file(text, &[0; 12]), &["b:", "hole after a"]);
    let whole = f32_file(&[("a", 1)]);
    for tail in [b"\0".as_slice(), b"PK\x03\x04some zip", b"\x80\x02}q\0."] {
        let expected = whole.len().to_string();
        refused(&[&whole, tail].concat(), &["after the last tensor", &expected]);
    }
}

#[test]
fn f011_c041_files_that_are_cut() {
    let whole = f32_file(&[("a", 512), ("b", 2048)]);
    for cut in [1, 4096, 8192, 10240] {
        let short = &whole[..whole.len() - cut];
        match open(short) {
            Ok(_) => panic!("accepted a cut file"),
            Err(e) => {
                let text = e.to_string();
                assert_eq!(e.exit_code(), 3);
                assert!(text.contains(&whole.len().to_string()) && text.contains(&short.len().to_string()), "{text}");
                assert_eq!(e.hint().unwrap(), "download incomplete?");
            }
        }
    }
}

#[test]
fn f012_c044_shape_and_range_that_disagree() {
    refused(&raw_file(&entry("\"F32\"", "[1000,1000]", "[0,4]"), &[0; 4]), &["4000000 bytes", "got 4"]);
    refused(&raw_file(&entry("\"F32\"", "[1]", "[8,4]"), &[0; 8]), &["begin <= end"]);
    refused(&raw_file(&entry("\"F32\"", "[1]", "[-1,4]"), &[0; 4]), &["-1"]);
    refused(&raw_file(&entry("\"F32\"", "[1]", "[0,2,4]"), &[0; 4]), &["expected 2 numbers, got 3"]);
    refused(&raw_file(&entry("\"F64\"", "[1]", "[0,4]"), &[0; 4]), &["8 bytes", "got 4"]);
    refused(&raw_file(&entry("\"F32\"", "[1]", "[0,18446744073709551615]"), &[0; 4]), &["t:"]);
}

#[test]
fn f013_dimensions_that_are_no_sizes() {
    for dim in ["-1", "1.5", "\"4\"", "null", "18446744073709551616", "true", "[1]"] {
        refused(&raw_file(&entry("\"F32\"", &format!("[{dim}]"), "[0,4]"), &[0; 4]), &["t:"]);
    }
}

#[test]
fn f014_f015_products_that_overflow() {
    refused(&raw_file(&entry("\"F32\"", "[4194305,4194305,211106198978564]", "[0,16]"), &[0; 16]), &["overflows"]);
    for shape in ["[0,18446744073709551615,18446744073709551615]", "[18446744073709551615,18446744073709551615,0]"] {
        refused(&raw_file(&entry("\"F32\"", shape, "[0,0]"), b""), &["overflows"]);
    }
}

#[test]
fn f016_f017_empty_tensors_scalars_and_ranks() {
    let shared = r#"{"e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"t":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
    let file = open(&raw_file(shared, &1.5f32.to_le_bytes())).unwrap();
    assert_eq!(file.read_f32("t").unwrap(), [1.5]);
    assert_eq!(file.info("e").unwrap().shape, [0, 3]);
    assert!(file.read_f32("e").unwrap().is_empty());
    refused(&raw_file(&entry("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), &[0; 4]), &["rank at most 8, got 9"]);
    // An empty tensor in the middle of another is an overlap.
    let inside = r#"{"e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    refused(&raw_file(inside, &[0; 8]), &["e:", "overlaps t"]);
}

#[test]
fn f018_f019_dtypes() {
    for dtype in ["f32", "Q4_0", "F4", "F6_E2M3", "F8_E4M3FNUZ", ""] {
        refused(&raw_file(&entry(&format!("{dtype:?}"), "[1]", "[0,4]"), &[0; 4]), &["dtype", "BF16"]);
    }
    refused(&raw_file(&entry("7", "[1]", "[0,4]"), &[0; 4]), &["t:"]);
    // The FP8 types are carried, each under its name, and not read as floats yet.
    for dtype in ["F8_E4M3", "F8_E5M2"] {
        let file = open(&raw_file(&entry(&format!("{dtype:?}"), "[4]", "[0,4]"), &[0x7e; 4])).unwrap();
        let e = file.read_f32("t").unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains(dtype), "{e}");
    }
}

#[test]
fn f020_data_at_an_odd_offset() {
    let text =
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#;
    let data: Vec<u8> = [7u8].into_iter().chain(1.25f32.to_le_bytes()).chain((-3.5f32).to_le_bytes()).collect();
    assert_eq!(open(&raw_file(text, &data)).unwrap().read_f32("t").unwrap(), [1.25, -3.5]);
}

#[test]
fn f023_hostile_names() {
    let named = |name: &str| {
        let mut map = serde_json::Map::new();
        map.insert(name.into(), serde_json::json!({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}));
        raw_file(&serde_json::Value::Object(map).to_string(), &[0; 4])
    };
    refused(&named(""), &["name of 1 to"]);
    refused(&named(&"n".repeat(65536)), &["65536 bytes"]);
    refused(&named("a\0b"), &["NUL"]);
    // A name is never a path; escapes never reach the terminal.
    assert!(open(&named("../../x")).is_ok());
    let e = open(&named("\u{1b}[31m\u{202e}")).unwrap().read_f32("\u{1b}[31m\u{202e}no").unwrap_err();
    assert!(!e.to_string().contains(['\u{1b}', '\u{202e}']), "{e}");
}

#[test]
fn f024_metadata_of_the_wrong_kind() {
    refused(&raw_file(r#"{"__metadata__":{"a":1}}"#, b""), &["__metadata__"]);
    refused(&raw_file(r#"{"__metadata__":{"a":"1","a":"2"}}"#, b""), &["__metadata__", "twice"]);
    refused(&raw_file(r#"{"__metadata__":[]}"#, b""), &["__metadata__"]);
    assert!(open(&raw_file(r#"{"__metadata__":{"a":"1"}}"#, b"")).is_ok());
}

#[cfg(unix)]
#[test]
fn f025_paths_that_are_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let link = dir.path().join("loop");
    std::os::unix::fs::symlink(&link, &link).unwrap();
    for (path, kind) in [
        (fifo.as_path(), "a FIFO"),
        (dir.path(), "a folder"),
        (Path::new("/dev/zero"), "a device"),
        (link.as_path(), "a symlink loop"),
        (&dir.path().join("none"), "no such file"),
    ] {
        let e = SafetensorsFile::open(path).unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains(kind), "{e}");
    }
    assert_eq!(Checkpoint::open(&fifo).unwrap_err().exit_code(), 3);
}

#[test]
fn f026_a_file_that_shrinks_after_it_was_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    std::fs::write(&path, f32_file(&[("a", 1 << 16), ("b", 1 << 16)])).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(300_000).unwrap();
    assert_eq!(file.read_f32("a").unwrap().len(), 1 << 16);
    let e = file.read_f32("b").unwrap_err();
    assert!(e.exit_code() == 4 && e.to_string().contains("shorter"), "{e}");
    // Replaced by rename: the open file is the old one.
    std::fs::write(&path, f32_file(&[("a", 4)])).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let other = dir.path().join("y");
    std::fs::write(&other, f32_file(&[("z", 1)])).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(file.read_f32("a").unwrap(), [0.0; 4]);
}

#[test]
fn f091_a_device_that_is_full_is_an_error() {
    // The file is written through a temporary sibling, so the sibling's folder must exist and take it.
    let x = NamedTensor { name: "x".into(), data: TensorData::I32 { shape: vec![2], data: vec![1, 2] } };
    let dir = tempfile::tempdir().unwrap();
    let e = write_safetensors(&dir.path().join("none/x.safetensors"), std::slice::from_ref(&x)).unwrap_err();
    assert_eq!(e.exit_code(), 4);
    let path = dir.path().join("x.safetensors");
    write_safetensors(&path, std::slice::from_ref(&x)).unwrap();
    // A set of tensors that cannot be written leaves the old file.
    let bad = NamedTensor { name: "y".into(), data: TensorData::I32 { shape: vec![3], data: vec![1, 2] } };
    for tensors in [vec![x.clone(), x.clone()], vec![bad]] {
        assert_eq!(write_safetensors(&path, &tensors).unwrap_err().exit_code(), 2);
        assert_eq!(SafetensorsFile::open(&path).unwrap().names().collect::<Vec<_>>(), ["x"]);
        assert_eq!(fixtures::list(dir.path()), ["x.safetensors"]);
    }
}

/// A small valid file with several dtypes.
fn valid() -> Vec<u8> {
    let text = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"I64","shape":[],"data_offsets":[32,40]}}"#;
    raw_file(text, &(0..40).collect::<Vec<u8>>())
}

/// Opens, and reads everything that can be read: no panic is the assertion, and a tensor has the size of its shape.
fn survives(bytes: &[u8]) {
    if let Ok(file) = open(bytes) {
        for name in file.names() {
            let info = file.info(name).unwrap();
            let (dtype, data) = file.read_stored(name).unwrap();
            assert_eq!(data.len(), info.shape.iter().product::<usize>() * dtype.size());
            let _ = file.read_f32(name);
        }
    }
}

#[test]
fn f099_every_single_bit_flip_and_truncation_is_survived() {
    let whole = valid();
    assert!(open(&whole).is_ok());
    for i in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[i / 8] ^= 1 << (i % 8);
        survives(&bytes);
    }
    for len in 0..whole.len() {
        assert!(open(&whole[..len]).is_err(), "accepted {len} of {} bytes", whole.len());
    }
}

proptest! {
    #[test]
    fn random_bytes_in_the_header_are_survived(edits in proptest::collection::vec((0usize..300, any::<u8>()), 1..6), cut in 0usize..40) {
        let mut bytes = valid();
        for (at, value) in edits {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        survives(&bytes);
    }

    #[test]
    fn random_json_text_is_survived(text in "[\\[\\]{}:,\"0-9a-z \\-.]{0,80}") {
        survives(&raw_file(&text, &[0; 16]));
    }
}
