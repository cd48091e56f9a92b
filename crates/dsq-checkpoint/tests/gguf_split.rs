//! Models split into several GGUF files: read as the whole, and refused by name where parts are missing or do not belong together
//! (fault F078). What the commands make of them is tests/it/gguf_split.rs.

mod gguf_writer;

use dsq_checkpoint::gguf::GgufFile;
use dsq_checkpoint::{Checkpoint, GgufExport, GgufOptions, GgufType};
use gguf_writer::*;
use std::path::{Path, PathBuf};

const UINT16: u32 = 2;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf").join(name)
}

fn number(writer: Writer, key: &str, n: u16) -> Writer {
    writer.set(key, UINT16, n.to_le_bytes().to_vec())
}

fn tensor_count(writer: Writer, n: i32) -> Writer {
    writer.set("split.tensors.count", INT32, n.to_le_bytes().to_vec())
}

/// The parts of a model, each with the tensors up to the next of `ends`.
fn parts(whole: &Writer, ends: &[usize]) -> Vec<Writer> {
    let mut start = 0;
    let part = |(no, end): (usize, &usize)| {
        let part = if no == 0 { Writer { tensors: vec![], ..whole.clone() } } else { Writer::empty() };
        let tensors = whole.tensors[std::mem::replace(&mut start, *end)..*end].to_vec();
        let part = number(number(part, "split.no", no as u16), "split.count", ends.len() as u16);
        tensor_count(Writer { tensors, ..part }, whole.tensors.len() as i32)
    };
    ends.iter().enumerate().map(part).collect()
}

fn name(no: usize, count: usize) -> String {
    format!("m-{no:05}-of-{count:05}.gguf")
}

/// Writes parts under their names; the folder and the first.
fn write(parts: &[Writer]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for (i, part) in parts.iter().enumerate() {
        std::fs::write(dir.path().join(name(i + 1, parts.len())), part.bytes()).unwrap();
    }
    let first = dir.path().join(name(1, parts.len()));
    (dir, first)
}

/// Opening `path` is refused as an invalid artifact, with each of `words` in the message or the hint.
#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let e = GgufFile::open(path).expect_err("the file was accepted");
    let message = format!("{e}\n{}", e.hint().unwrap_or_default());
    assert_eq!(e.exit_code(), 3, "{message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is missing in: {message}");
    }
}

#[track_caller]
fn parts_refused(parts: &[Writer], words: &[&str]) {
    let (_dir, first) = write(parts);
    refused(&first, words);
}

#[track_caller]
fn same_model(path: &Path, whole: &Path) {
    let (a, b) = (Checkpoint::open(path).unwrap(), Checkpoint::open(whole).unwrap());
    assert_eq!(a.names(), b.names());
    assert_eq!(a.config(), b.config());
    for name in b.names() {
        assert_eq!(a.info(&name), b.info(&name), "{name}");
        assert_eq!(a.sha256(&name).unwrap(), b.sha256(&name).unwrap(), "{name}");
        assert_eq!(a.read_f32(&name).unwrap(), b.read_f32(&name).unwrap(), "{name}");
    }
    assert_eq!(a.tokenizer_json().unwrap(), b.tokenizer_json().unwrap());
    assert_eq!(a.aux_files().unwrap(), b.aux_files().unwrap());
    let faults = |c: &Checkpoint| c.faults().into_iter().map(|f| (f.field, f.problem)).collect::<Vec<_>>();
    assert_eq!(faults(&a), faults(&b));
}

#[test]
fn parts_are_read_as_the_whole() {
    let quantized = |t: &mut Tensor| (t.ty, t.data) = (Q8_0, [&[0, 0x38][..], &[7; 32]].concat().repeat(32));
    let whole =
        toy_with_tokenizer().change("blk.0.ffn_up.weight", quantized).text("tokenizer.chat_template", "{{ x }}");
    let n = whole.tensors.len();
    for ends in [&[1, n][..], &[n - 1, n], &[4, 7, n], &[0, 5, n], &[0, n]] {
        let (dir, first) = write(&parts(&whole, ends));
        let path = dir.path().join("whole.gguf");
        std::fs::write(&path, whole.bytes()).unwrap();
        same_model(&first, &path);
    }
    // Merged again, or split into one: the keys of the split say nothing.
    for count in [0, 1] {
        let merged = number(number(whole.clone(), "split.no", 0), "split.count", count);
        open(&merged.bytes()).unwrap();
    }
}

#[test]
fn parts_that_pypi_gguf_wrote_are_read_as_the_file_that_it_wrote() {
    same_model(&golden("split-00001-of-00003.gguf"), &golden("whole.gguf"));
}

/// Parts are looked for beside the name that was given, so a folder of links to files of other names works.
#[cfg(unix)]
#[test]
fn parts_may_be_links() {
    let (dir, links) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for i in 1..=3 {
        let blob = dir.path().join(format!("blob{i}"));
        std::fs::copy(golden(&format!("split-{i:05}-of-00003.gguf")), &blob).unwrap();
        std::os::unix::fs::symlink(&blob, links.path().join(name(i, 3))).unwrap();
    }
    same_model(&links.path().join(name(1, 3)), &golden("whole.gguf"));
}

/// The parts of a model give the very file that the whole gives, without the keys of the split; nothing is written over a part.
#[test]
fn a_split_source_is_written_as_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let write = |source: &Path, out: &Path| {
        let options = GgufOptions { ty: GgufType::Q8_0, dtype: None, requantize: false, keep: vec![], overwrite: true };
        let source = Checkpoint::open(source).unwrap();
        GgufExport::new(&source, out, GgufOptions { requantize: true, ..options })?
            .write(&|grid, x| grid.quantize(x), &mut || ())
            .map(|proof| serde_json::to_string(&proof.tensors).unwrap())
    };
    let [a, b] = ["a.gguf", "b.gguf"].map(|n| dir.path().join(n));
    let (split, whole) = (golden("split-00001-of-00003.gguf"), golden("whole.gguf"));
    assert_eq!(write(&split, &a).unwrap(), write(&whole, &b).unwrap());
    let bytes = std::fs::read(&a).unwrap();
    assert!(bytes == std::fs::read(&b).unwrap());
    assert!(!bytes.windows(6).any(|w| w == b"split."), "a key of the split is left");
    for i in 1..=3 {
        std::fs::copy(golden(&format!("split-{i:05}-of-00003.gguf")), dir.path().join(name(i, 3))).unwrap();
    }
    for i in 1..=3 {
        let e = write(&dir.path().join(name(1, 3)), &dir.path().join(name(i, 3))).unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
        assert!(e.to_string().contains("the output is the input") && e.to_string().contains(&name(i, 3)), "{e}");
    }
    // A file that was split after its export: the proof beside the first part vouches for the tensors.
    let proof = dsq_checkpoint::gguf::proof_path;
    let first = dir.path().join(name(1, 3));
    write(&first, &a).unwrap();
    std::fs::copy(proof(&a), proof(&first)).unwrap();
    let problems: Vec<String> = Checkpoint::open(&first).unwrap().faults().into_iter().map(|f| f.problem).collect();
    assert!(problems.iter().any(|p| p.contains("got 3 parts: only tensors are compared")), "{problems:?}");
    assert!(problems.iter().any(|p| p.contains("not the tensor that was exported")), "the types differ: {problems:?}");
}

#[test]
fn f078_parts_that_are_missing_are_named_together() {
    let (dir, first) = write(&parts(&toy(), &[1, 3, 5, 11]));
    for i in [2, 4] {
        std::fs::remove_file(dir.path().join(name(i, 4))).unwrap();
    }
    refused(&first, &["split.count", "expected 4 parts", "2 missing", &name(2, 4), &name(4, 4), "incomplete?"]);
    assert!(!GgufFile::open(&first).unwrap_err().to_string().contains(&name(3, 4)));
}

#[test]
fn f078_another_part_names_the_first() {
    let (dir, first) = write(&parts(&toy(), &[1, 3, 11]));
    for i in [2, 3] {
        let words = [&format!("got part {i} of 3"), "the first part", first.to_str().unwrap()];
        refused(&dir.path().join(name(i, 3)), &words);
    }
    // A name that does not say what the keys say.
    for (from, to) in [(1, "other.gguf".into()), (1, name(1, 4)), (3, name(1, 3))] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(&to);
        std::fs::write(&path, parts(&toy(), &[1, 3, 11])[from - 1].bytes()).unwrap();
        refused(&path, &["split.no", &format!("called NAME-{from:05}-of-00003.gguf"), &format!("got {to}")]);
    }
}

#[test]
fn f078_parts_of_two_models() {
    let one = parts(&toy(), &[2, 6, 11]);
    let with = |no: usize, part: Writer| {
        let mut out = one.clone();
        out[no] = part;
        out
    };
    let (second, third) = (&format!("{}: ", name(2, 3)), &format!("{}: ", name(3, 3)));
    // The same place of a model that was split elsewhere: a tensor twice, and one too few.
    let other = parts(&toy(), &[2, 7, 11]);
    parts_refused(&with(1, other[1].clone()), &[third, "blk.0.ffn_gate.weight", &name(2, 3), "one model"]);
    parts_refused(&with(2, other[2].clone()), &["split.tensors.count", "expected 11 tensors in all 3", "got 10"]);
    // Of a model with more tensors, or more parts; another key.
    let bigger = toy().tensor("output.weight", &[32, 8], F32, floats(&[0.5; 256]));
    let bigger = parts(&bigger, &[2, 6, 12]);
    parts_refused(&with(1, bigger[1].clone()), &[second, "split.tensors.count", "expected 11, got 12"]);
    let more = parts(&toy(), &[2, 6, 8, 11]);
    parts_refused(&with(1, more[1].clone()), &[second, "split.count", "expected 3, got 4"]);
    parts_refused(&with(2, one[2].clone().text("general.architecture", "qwen2")), &[third, "\"llama\"", "\"qwen2\""]);
    parts_refused(&with(2, one[2].clone().text("general.name", "x")), &[third, "general.name", "no such key", "\"x\""]);
    // What the first part says too may be said again; the alignment is each file's own.
    let again = Writer { alignment: 64, ..one[2].clone() }.text("general.architecture", "llama");
    let (_dir, first) = write(&with(2, again.u32("general.alignment", 64)));
    GgufFile::open(&first).unwrap();
    // A part of a model of other widths: the config tells.
    let wide = one[2].clone().change("blk.0.ffn_up.weight", |t| (t.ne, t.data) = (vec![64, 32], floats(&[1.0; 2048])));
    parts_refused(&with(2, wide), &["blk.0.ffn_up.weight", "got [32, 64]"]);
    // A part that is cut.
    let (dir, first) = write(&one);
    let last = dir.path().join(name(3, 3));
    let len = std::fs::metadata(&last).unwrap().len();
    std::fs::File::options().write(true).open(&last).unwrap().set_len(len - 1).unwrap();
    refused(&first, &[third, "blk.0.ffn_norm.weight", "download incomplete?"]);
}

#[test]
fn f078_numbers_of_parts() {
    let one = parts(&toy(), &[2, 6, 11]);
    let with = |no: usize, part: Writer| {
        let mut out = one.clone();
        out[no] = part;
        out
    };
    let second = &format!("{}: ", name(2, 3));
    parts_refused(&with(1, number(one[1].clone(), "split.no", 2)), &[second, "split.no", "expected 1, got 2"]);
    parts_refused(&with(1, one[1].clone().without("split.no")), &[second, "split.no", "missing"]);
    parts_refused(&with(1, toy().without("llama.block_count")), &[second, "split.no", "missing"]);
    parts_refused(&with(0, one[0].clone().without("split.tensors.count")), &["split.tensors.count", "missing"]);
    parts_refused(&with(0, one[0].clone().without("split.no")), &["split.no", "missing"]);
    parts_refused(&with(0, number(one[0].clone(), "split.no", 3)), &["split.no", "below split.count = 3, got 3"]);
    parts_refused(&with(0, tensor_count(one[0].clone(), -1)), &["split.tensors.count", "INT32 -1"]);
    parts_refused(&with(0, one[0].clone().text("split.count", "3")), &["split.count", "UINT16", "STRING"]);
    let all = one.iter().map(|part| tensor_count(part.clone(), 12)).collect::<Vec<_>>();
    parts_refused(&all, &["split.tensors.count", "expected 12 tensors", "got 11", "one model"]);
    let many = number(one[0].clone(), "split.count", u16::MAX);
    parts_refused(&with(0, many), &["split.count", "at most 1000 parts, got 65535"]);
}

/// Errors of reading name the part that has the tensor.
#[test]
fn what_is_wrong_with_a_tensor_names_its_part() {
    let bad = toy().change("blk.0.ffn_up.weight", |t| t.data[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    let (dir, first) = write(&parts(&bad, &[2, 6, 11]));
    let file = GgufFile::open(&first).unwrap();
    let e = file.read_f32("model.layers.0.mlp.up_proj.weight").unwrap_err();
    assert_eq!(e.exit_code(), 6);
    assert!(e.to_string().contains(&name(3, 3)), "{e}");
    std::fs::File::options().write(true).open(dir.path().join(name(2, 3))).unwrap().set_len(100).unwrap();
    let e = file.read_f32("model.layers.0.self_attn.v_proj.weight").unwrap_err();
    assert_eq!(e.exit_code(), 4);
    assert!(e.to_string().contains(&name(2, 3)), "{e}");
    // Bytes behind the tensors of any part are reported, by its name.
    let path = dir.path().join(name(3, 3));
    std::fs::write(dir.path().join(name(2, 3)), parts(&bad, &[2, 6, 11])[1].bytes()).unwrap();
    std::fs::write(&path, [&std::fs::read(&path).unwrap()[..], b"PK"].concat()).unwrap();
    let faults = GgufFile::open(&first).unwrap().faults();
    assert!(faults.iter().any(|f| f.file == path && f.problem.contains("got 2 bytes more")), "{faults:?}");
}
