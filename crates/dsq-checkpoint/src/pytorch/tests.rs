//! The reader of PyTorch files on small hand-made ones, sound and hostile. Not a real model (see `tests/it/efficientnet.rs`).

use super::*;

fn text(s: &str) -> Vec<u8> {
    [b"X".as_slice(), &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat()
}

fn int(n: i32) -> Vec<u8> {
    [b"J".as_slice(), &n.to_le_bytes()].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(".to_vec(), items.concat(), b"t".to_vec()].concat()
}

fn ints(items: &[i32]) -> Vec<u8> {
    tuple(&items.iter().map(|&n| int(n)).collect::<Vec<_>>())
}

/// `_rebuild_tensor_v2` of storage `key` with `n` elements.
fn tensor(kind: &str, key: &str, n: i32, offset: i32, shape: &[i32], stride: &[i32]) -> Vec<u8> {
    tensor_of(kind, key, n, offset, [ints(shape), ints(stride)])
}

/// The same of pickled sizes and strides.
fn tensor_of(kind: &str, key: &str, n: i32, offset: i32, [shape, stride]: [Vec<u8>; 2]) -> Vec<u8> {
    let id = [
        tuple(&[text("storage"), format!("ctorch\n{kind}\n").into(), text(key), text("cpu"), int(n), b"N".to_vec()]),
        b"Q".to_vec(),
    ]
    .concat();
    let hooks = b"ccollections\nOrderedDict\n)R".to_vec();
    let arguments = tuple(&[id, int(offset), shape, stride, vec![0x89], hooks]);
    [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, b"R".to_vec()].concat()
}

fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> = items.iter().flat_map(|(k, v)| [text(k), v.clone()].concat()).collect();
    [b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec(), items, b"u.".to_vec()].concat()
}

/// A file with this state dict, these keys and these bytes after them.
fn file(state: Vec<u8>, keys: &[&str], data: &[u8]) -> Vec<u8> {
    let keys: Vec<u8> = keys.iter().flat_map(|k| text(k)).collect();
    let version = [b"\x80\x02M".as_slice(), &1001u16.to_le_bytes(), b"."].concat();
    let system = [b"\x80\x02}(".to_vec(), text("little_endian"), vec![0x88], b"u.".to_vec()].concat();
    let keys = [b"\x80\x02](".to_vec(), keys, b"e.".to_vec()].concat();
    [MAGIC.to_vec(), version, system, state, keys, data.to_vec()].concat()
}

fn storage(values: &[f32]) -> Vec<u8> {
    let mut out = (values.len() as u64).to_le_bytes().to_vec();
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    out
}

fn open(bytes: &[u8]) -> Result<(tempfile::TempDir, PytorchFile), CheckpointError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.pth");
    std::fs::write(&path, bytes).unwrap();
    PytorchFile::open(&path).map(|f| (dir, f))
}

fn refused(bytes: &[u8], words: &str) {
    let e = open(bytes).map(|_| ()).unwrap_err();
    assert_eq!(e.exit_code(), 3, "{e}");
    assert!(e.to_string().contains(words), "{e} lacks {words:?}");
}

fn values(f: &PytorchFile, name: &str) -> Vec<f32> {
    let (_, bytes) = f.read(name).unwrap().unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

const SIX: [f32; 6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];

fn sound() -> Vec<u8> {
    let state = dict(&[
        ("plain", tensor("FloatStorage", "a", 6, 0, &[2, 3], &[3, 1])),
        ("turned", tensor("FloatStorage", "a", 6, 0, &[3, 2], &[1, 3])),
        ("part", tensor("FloatStorage", "a", 6, 1, &[2, 2], &[3, 1])),
        ("one", tensor("FloatStorage", "a", 6, 4, &[], &[])),
        ("none", tensor("FloatStorage", "a", 6, 99, &[0, 3], &[3, 1])),
        ("count", tensor("LongStorage", "b", 1, 0, &[1], &[1])),
    ]);
    let data = [storage(&SIX), 1u64.to_le_bytes().to_vec(), 7i64.to_le_bytes().to_vec()].concat();
    file(state, &["a", "b"], &data)
}

#[test]
fn strides_and_offsets_are_honoured() {
    let (_dir, f) = open(&sound()).unwrap();
    assert_eq!(f.names(), ["plain", "turned", "part", "one", "none", "count"]);
    assert_eq!(values(&f, "plain"), SIX);
    assert_eq!(values(&f, "turned"), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(values(&f, "part"), [1.0, 2.0, 4.0, 5.0]);
    assert_eq!(values(&f, "one"), [4.0]);
    assert!(values(&f, "none").is_empty());
    assert_eq!(f.read("count").unwrap().unwrap(), (Dtype::I64, 7i64.to_le_bytes().to_vec()));
    assert_eq!(f.info("turned").unwrap(), TensorInfo { dtype: "F32".into(), shape: vec![3, 2], bytes: 24 });
    assert!(f.read("x").unwrap().is_none() && f.faults().is_empty());
    let (_dir, f) = open(&[sound(), vec![0]].concat()).unwrap();
    assert!(f.faults()[0].problem.contains("1 bytes more"));
}

#[test]
fn f080_functions_that_a_state_dict_does_not_need_are_refused_by_name() {
    for (module, name) in [("os", "system"), ("builtins", "eval"), ("posix", "system"), ("torch", "load")] {
        let call = format!("\x02c{module}\n{name}\n(X\x04\0\0\0truetR.");
        let state = [&[0x80][..], call.as_bytes()].concat();
        refused(&file(state, &[], &[]), &format!("{module}.{name}"));
    }
    // What is allowed must not be called with anything else, nor anything else be called.
    let call = |what: &str| file([b"\x80\x02".as_slice(), what.as_bytes(), b"."].concat(), &[], &[]);
    refused(&call("ccollections\nOrderedDict\n(NtR"), "OrderedDict");
    refused(&call("K\x01)R"), "a named function");
    refused(&call("ctorch\nFloatStorage\n)R"), "F32");
    refused(&call("Vx\n"), "opcode");
    refused(&call("(cos\nsystem\no"), "os.system");
    refused(&call("}}b"), "tensors, got 0");
    refused(&call("N}b"), "state of a dict");
}

#[test]
fn every_cut_is_an_error_that_says_so() {
    let whole = sound();
    for len in 0..whole.len() {
        let e = open(&whole[..len]).map(|_| ()).unwrap_err();
        assert_eq!(e.exit_code(), 3, "cut at {len}: {e}");
    }
    refused(&whole[..whole.len() - 1], "storage b");
}

#[test]
fn one_changed_byte_is_never_a_panic() {
    let whole = sound();
    for at in 0..whole.len() {
        for flip in [1u8, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            if let Ok((_dir, f)) = open(&bytes) {
                for name in f.names() {
                    f.read(&name).unwrap();
                }
            }
        }
    }
}

#[test]
fn tensors_outside_their_storage_are_refused_with_the_numbers() {
    let one = |offset, shape: &[i32], stride: &[i32]| {
        file(dict(&[("w", tensor("FloatStorage", "a", 6, offset, shape, stride))]), &["a"], &storage(&SIX))
    };
    refused(&one(1, &[2, 3], &[3, 1]), "within the storage of 6 elements");
    refused(&one(0, &[2, 3], &[4, 1]), "within the storage of 6 elements");
    refused(&one(7, &[1], &[1]), "within the storage of 6 elements");
    // A stride of 0 makes any number of values of one.
    refused(&one(0, &[i32::MAX, i32::MAX], &[0, 0]), "within the storage of 6 elements");
    refused(&one(0, &[i32::MAX, i32::MAX, i32::MAX, i32::MAX], &[1, 1, 1, 1]), "within the storage");
    refused(&one(0, &[-1], &[1]), "at least 0");
    refused(&one(-1, &[1], &[1]), "at least 0");
    refused(&one(0, &[1], &[-1]), "at least 0");
    refused(&one(0, &[1, 1], &[1]), "a stride for each dimension");
    refused(&one(0, &[1; 9], &[1; 9]), "at least 0");
}

#[test]
fn a_tensor_without_elements_may_have_any_other_sizes() {
    // Their product overflows, which a build with overflow checks (as of `fuzz/`) does not forgive.
    let big = [b"\x8a\x08".as_slice(), &(1i64 << 40).to_le_bytes()].concat();
    let sizes = [tuple(&[int(0), big.clone(), big.clone()]), tuple(&[int(1), big, int(1)])];
    let state = dict(&[("w", tensor_of("FloatStorage", "a", 6, 0, sizes))]);
    let (_dir, f) = open(&file(state, &["a"], &storage(&SIX))).unwrap();
    assert!(values(&f, "w").is_empty());
    assert_eq!(f.info("w").unwrap().bytes, 0);
}

#[test]
fn storages_must_be_those_of_the_file() {
    let state = |n| dict(&[("w", tensor("FloatStorage", "a", n, 0, &[1], &[1]))]);
    refused(&file(state(7), &["a"], &storage(&SIX)), "expected 7 elements of F32");
    refused(&file(state(5), &["a"], &storage(&SIX)), "expected 5 elements as the state dict says, got 6");
    refused(&file(state(i32::MAX), &["a"], &storage(&SIX)), "expected 2147483647 elements of F32");
    refused(&file(state(6), &[], &storage(&SIX)), "in the list of keys");
    refused(&file(state(6), &["a", "a"], &storage(&SIX)), "named once");
    refused(&file(state(6), &["b"], &storage(&SIX)), "storage b");
    refused(&file(state(-1), &["a"], &storage(&SIX)), "at least 0 elements");
    let two = dict(&[
        ("v", tensor("FloatStorage", "a", 6, 0, &[1], &[1])),
        ("w", tensor("HalfStorage", "a", 6, 0, &[1], &[1])),
    ]);
    refused(&file(two, &["a"], &storage(&SIX)), "two types or sizes");
    let twice = dict(&[
        ("w", tensor("FloatStorage", "a", 6, 0, &[1], &[1])),
        ("w", tensor("FloatStorage", "a", 6, 0, &[1], &[1])),
    ]);
    refused(&file(twice, &["a"], &storage(&SIX)), "a second");
}

#[test]
fn other_contents_are_named() {
    refused(b"\x80\x02}.", "magic number");
    refused(&file(dict(&[]), &[], &[]), "1 to 65536 tensors, got 0");
    refused(&file(dict(&[("epoch", int(3))]), &[], &[]), "epoch: expected a tensor, got an integer");
    refused(&file(b"\x80\x02N.".to_vec(), &[], &[]), "a dict of tensors, got None");
    let mut old = sound();
    old[MAGIC.len() + 3] ^= 1;
    refused(&old, "expected 1001");
}

/// An archive of stored entries as torch writes it: padding behind the local names, sizes in the directory alone.
fn archive(entries: &[(&str, Vec<u8>)], method: u8) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let (at, n, size) = (out.len() as u32, name.len() as u16, data.len() as u32);
        out.extend(
            [ZIP, &[0; 22], &n.to_le_bytes(), &5u16.to_le_bytes(), name.as_bytes(), &[b'Z'; 5], data.as_slice()]
                .concat(),
        );
        let (sizes, n) = ([size.to_le_bytes(), size.to_le_bytes()].concat(), n.to_le_bytes());
        let head =
            [b"PK\x01\x02\0\0\0\0\x08\x08".as_slice(), &[method, 0, 0, 0, 0, 0, 0, 0, 0, 0], sizes.as_slice(), &n]
                .concat();
        directory.extend([head, vec![0; 12], at.to_le_bytes().to_vec(), name.as_bytes().to_vec()].concat());
    }
    let (count, size, start) = (entries.len() as u16, directory.len() as u32, out.len() as u32);
    let count = count.to_le_bytes();
    out.extend(directory);
    out.extend([b"PK\x05\x06\0\0\0\0".as_slice(), &count, &count].concat());
    out.extend([size.to_le_bytes(), start.to_le_bytes()].concat());
    out.extend([0, 0]);
    out
}

fn sound_archive() -> Vec<(&'static str, Vec<u8>)> {
    let state = dict(&[("w", tensor("FloatStorage", "0", 6, 0, &[3, 2], &[1, 3]))]);
    let data: Vec<u8> = SIX.iter().flat_map(|v| v.to_le_bytes()).collect();
    vec![("m/data.pkl", state), ("m/byteorder", b"little".to_vec()), ("m/data/0", data)]
}

#[test]
fn archives_are_read_too() {
    let (_dir, f) = open(&archive(&sound_archive(), 0)).unwrap();
    assert_eq!(values(&f, "w"), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert!(f.faults().is_empty());
    refused(&archive(&sound_archive(), 8), "m/data.pkl: expected a stored entry");
    refused(&archive(&sound_archive()[1..], 0), "expected FOLDER/data.pkl");
    refused(&archive(&sound_archive()[..2], 0), "m/data/0: expected this storage");
    let with = |i: usize, bytes: Vec<u8>| {
        let mut entries = sound_archive();
        entries[i].1 = bytes;
        archive(&entries, 0)
    };
    refused(&with(1, b"big".to_vec()), "expected little, got big");
    refused(&with(2, vec![0; 23]), "expected 6 elements of F32, got 23 bytes");
    refused(&with(0, b"\x80\x02cos\nsystem\n.".to_vec()), "os.system");
    let twice = [sound_archive(), sound_archive()].concat();
    refused(&archive(&twice, 0), "expected every name once");
    let whole = archive(&sound_archive(), 0);
    for len in 4..whole.len() {
        assert_eq!(open(&whole[..len]).map(|_| ()).unwrap_err().exit_code(), 3, "cut at {len}");
    }
    for at in 0..whole.len() {
        for flip in [1u8, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            if let Ok((_dir, f)) = open(&bytes) {
                f.names().iter().for_each(|n| drop(f.read(n).unwrap()));
            }
        }
    }
}

#[test]
fn bombs_are_bounded() {
    let state = |ops: Vec<u8>| file([b"\x80\x02".to_vec(), ops, b".".to_vec()].concat(), &[], &[]);
    // A million values; deep nesting, also of a value in itself; a memo of a million names.
    refused(&state(b"N".repeat(1 << 20 | 1)), "at most 1048576 values");
    let deep = [b"N".to_vec(), vec![0x85; 1 << 19]].concat();
    refused(&state(deep), "a dict of tensors, got a tuple");
    refused(&state(b"]q\0h\0a".to_vec()), "a dict of tensors, got a list");
    let memo: Vec<u8> = (0..1u32 << 20 | 1).flat_map(|i| [b"r".as_slice(), &i.to_le_bytes()].concat()).collect();
    refused(&state([b"N".to_vec(), memo].concat()), "entries in the memo");
    // A tuple of a tuple of a tuple ..., each ten times the one before, takes no more memory than the file.
    let laughs: Vec<u8> = (0..100u8)
        .flat_map(|i| [b"(".to_vec(), [b'h', i].repeat(10), b"t".to_vec(), vec![b'q', i + 1]].concat())
        .collect();
    refused(&state([b"Nq\0".to_vec(), laughs].concat()), "a dict of tensors, got a tuple");
    refused(&state(b"X\xff\xff\xff\xff".to_vec()), "ends early");
    let key = "k".repeat(65);
    refused(
        &file(dict(&[("w", tensor("FloatStorage", &key, 1, 0, &[1], &[1]))]), &[&key], &storage(&[1.0])),
        "short key",
    );
}
