//! Bad GGUF headers, keys and tensors (faults F064 to F079, case C047): each is refused by name, and none of them by a panic or
//! a large allocation. The tokenizer's keys have their own file, `gguf_tokenizer.rs`.

mod gguf_writer;

use dsq_checkpoint::ModelConfig;
use gguf_writer::*;

#[test]
fn the_toy_models_are_valid() {
    for writer in [toy(), toy_with_tokenizer(), Writer { version: 2, ..toy() }] {
        let (file, _folder) = open(&writer.bytes()).unwrap();
        assert_eq!(file.names().len(), 11);
        let faults = file.faults();
        assert!(faults.iter().all(|f| f.field.starts_with("tokenizer.")), "{faults:?}");
    }
}

#[test]
fn c035_interleaved_rows_are_read_in_hugging_face_order() {
    // File row r of k is filled with r; the original order of the file's rows is 0 2 1 3 | 4 6 5 7.
    let stored = [0, 2, 1, 3, 4, 6, 5, 7];
    let data = stored.iter().flat_map(|i| floats(&[*i as f32; 32])).collect();
    let (file, _folder) = open(&toy().change("blk.0.attn_k.weight", |t| t.data = data).bytes()).unwrap();
    let first = |name: &str| -> Vec<f32> {
        file.read_f32(&format!("model.layers.0.{name}.weight")).unwrap().chunks(32).map(|row| row[0]).collect()
    };
    assert_eq!(first("self_attn.k_proj"), [0., 1., 2., 3., 4., 5., 6., 7.]);
    let q: Vec<f32> = (0..8).flat_map(|h| [0, 2, 1, 3].map(|i| (4 * h + i) as f32)).collect();
    assert_eq!(first("self_attn.q_proj"), q, "of an identity the inverse permutation shows, here its own inverse");
    assert_eq!(first("self_attn.v_proj"), [0., 1., 2., 3., 4., 5., 6., 7.], "values are not interleaved");
}

#[test]
fn f064_magic_and_version() {
    refused(b"");
    assert!(refused(b"GGUF\x03\0\0").contains("expected at least 24 bytes"));
    for (magic, name) in [
        (b"lmgg", "before GGUF"),
        (b"tjgg", "before GGUF"),
        (b"FUGG", "swapped"),
        (b"vers", "Git LFS"),
        (b"PK\x03\x04", "something else"),
    ] {
        refused_with(&Writer { magic: *magic, ..toy() }, &["magic", name]);
    }
    for version in [0, 1, 4] {
        refused_with(&Writer { version, ..toy() }, &["version", "expected 2 or 3", &format!("got {version}")]);
    }
    refused_with(&Writer { version: 3u32.swap_bytes(), ..toy() }, &["big-endian file of version 3"]);
}

#[test]
fn f065_counts_beyond_the_file() {
    for count in [u64::MAX, 1 << 40, 1 << 63, 70_000] {
        let writer = Writer { n_kv: Some(count), ..Writer::empty() };
        refused_with(&writer, &["metadata_kv_count", &format!("got {count}"), "bytes remain"]);
        let writer = Writer { n_tensors: Some(count), ..toy() };
        refused_with(&writer, &["tensor_count", &format!("got {count}")]);
    }
    // A count that fits the bytes, but not what follows.
    refused(&Writer { n_kv: Some(9), ..toy() }.bytes());
    refused(&Writer { n_tensors: Some(12), ..toy() }.bytes());
}

#[test]
fn f066_keys_and_strings() {
    let with_key = |key: Vec<u8>| {
        let mut w = toy();
        w.pairs.insert(1, (key, UINT32, vec![1, 0, 0, 0]));
        w
    };
    refused_with(&with_key(Vec::new()), &["key 1", "empty"]);
    refused_with(&with_key(vec![b'k'; 65536]), &["key 1", "at most 65535 bytes, got 65536"]);
    refused_with(&with_key(b"k\xff".to_vec()), &["key 1", "UTF-8", "0xff"]);
    refused_with(&toy().set("general.name", STRING, string(b"\xc3\x28")), &["general.name", "UTF-8"]);
    let long = (1u64 << 63).to_le_bytes().to_vec();
    refused_with(&toy().set("general.name", STRING, long), &["general.name", &format!("got {}", 1u64 << 63)]);
    open(&toy().text("general.name", "").bytes()).unwrap();
    // A name is not printed raw.
    refused_with(&with_key(b"llama.\x1b[31m".to_vec()), &["llama.\\u{1b}[31m"]);
}

#[test]
fn f067_arrays_and_booleans() {
    let key = "general.tags";
    let mut nested = Vec::new();
    for _ in 0..100 {
        nested.extend(ARRAY.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    refused_with(&toy().set(key, ARRAY, nested), &[key, "array of arrays"]);
    for ty in [UINT8, STRING, FLOAT32] {
        let huge = [&ty.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat();
        refused_with(&toy().set(key, ARRAY, huge), &[key, &format!("got {}", 1u64 << 40), "bytes remain"]);
    }
    refused_with(&toy().set(key, ARRAY, array(77, &[])), &[key, "got 77"]);
    refused_with(&toy().set(key, 13, vec![]), &[key, "got 13"]);
    refused_with(&toy().set(key, BOOL, vec![2]), &[key, "0 or 1, got 2"]);
    refused_with(&toy().set(key, ARRAY, array(BOOL, &[vec![1], vec![0], vec![255]])), &[key, "got 255 at index 2"]);
    open(&toy().set(key, ARRAY, array(STRING, &[])).bytes()).unwrap();
}

#[test]
fn f068_duplicates() {
    let mut w = toy();
    w.pairs.push(w.pairs[3].clone());
    refused_with(&w, &["llama.embedding_length", "twice"]);
    let mut w = toy();
    w.tensors[2].name = w.tensors[0].name.clone();
    refused_with(&w, &["token_embd.weight", "twice"]);
}

#[test]
fn f069_alignment() {
    let key = "general.alignment";
    for value in [0, 1, 3, 4, 12, 1 << 31] {
        refused_with(&toy().u32(key, value), &[key, &format!("got {value}")]);
    }
    refused_with(&toy().set(key, INT32, 32i32.to_le_bytes().to_vec()), &[key, "UINT32", "INT32 32"]);
    refused_with(&toy().text(key, "32"), &[key, "UINT32", "STRING \"32\""]);
    for alignment in [8, 32, 256, 4096] {
        open(&Writer { alignment, ..toy() }.u32(key, alignment as u32).bytes()).unwrap();
    }
}

#[test]
fn f070_dimensions() {
    let name = "blk.0.attn_v.weight";
    let with = |ne: &[u64]| toy().change(name, |t| t.ne = ne.to_vec());
    refused_with(&with(&[]), &[name, "1 to 4 dimensions, got 0"]);
    refused_with(&with(&[32, 8, 1, 1, 1]), &[name, "1 to 4 dimensions, got 5"]);
    refused_with(&with(&[32, 0]), &[name, "positive dimensions"]);
    refused_with(&with(&[1 << 32, 1 << 32]), &[name, "overflows"]);
    refused_with(&with(&[u64::MAX, u64::MAX, 2, 2]), &[name, "overflows"]);
    // 2^62 values of 4 bytes: the product fits, the bytes do not; then 2^64 - 4 bytes, which only the padding overflows.
    refused_with(&with(&[1 << 62]), &[name, "overflows"]);
    refused_with(&with(&[(1 << 62) - 1]), &[name, "overflows"]);
    let half = toy().change(name, |t| (t.ne, t.data) = (vec![32, 4], vec![0; 512]));
    refused_with(&half, &["tensors", name, "expected the shape [8, 32], got [4, 32]"]);
    let mut bytes = toy().bytes();
    let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).unwrap() + name.len();
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refused(&bytes).contains("got 4294967295"));
}

#[test]
fn f071_types() {
    let name = "blk.0.ffn_up.weight";
    for (ty, what) in
        [(4, "removed"), (5, "removed"), (10, "Q2_K"), (39, "MXFP4"), (99, "unknown"), (u32::MAX, "unknown")]
    {
        refused_with(&toy().change(name, |t| t.ty = ty), &[name, what, &format!("got {ty}"), "Q4_K"]);
    }
    refused_with(&toy().change(name, |t| t.ty = Q4_K), &[name, "multiple of 256", "Q4_K", "got 32"]);
    refused_with(
        &toy().change(name, |t| t.ne[0] = 31).change(name, |t| t.ty = Q8_0),
        &[name, "multiple of 32", "got 31"],
    );
}

#[test]
fn f072_offsets() {
    let name = "output_norm.weight";
    let with = |offset: u64| toy().change(name, |t| t.offset = Some(offset));
    // The embedding takes 8 * 32 * 4 = 1024 bytes.
    refused_with(&with(1028), &[name, "multiple of 32", "got 1028"]);
    refused_with(&with(992), &[name, "overlaps", "expected 1024", "token_embd.weight", "got 992"]);
    refused_with(&with(1056), &[name, "hole", "expected 1024", "got 1056"]);
    refused_with(&with(u64::MAX - 31), &[name, &format!("got {}", u64::MAX - 31)]);
    refused_with(&with(u64::MAX), &[name, "aligned"]);
    refused_with(&toy().change("token_embd.weight", |t| t.offset = Some(32)), &["token_embd.weight", "expected 0"]);
}

#[test]
fn f073_data_cut() {
    let bytes = toy().bytes();
    let message = refused(&bytes[..bytes.len() - 1]);
    assert!(message.contains("blk.0.ffn_norm.weight") && message.contains("download incomplete?"), "{message}");
    assert!(message.contains(&format!("a file of {} bytes", bytes.len() - 1)), "{message}");
    // Bytes after the last tensor are read over, and reported.
    let (file, _folder) = open(&[&bytes[..], b"PK"].concat()).unwrap();
    assert!(file.faults().iter().any(|f| f.problem.contains("got 2 bytes more")));
}

#[test]
fn f074_architecture_keys() {
    refused_with(&toy().without("general.architecture"), &["general.architecture", "missing"]);
    refused_with(&toy().text("general.architecture", "gemma"), &["general.architecture", "\"llama\"", "\"gemma\""]);
    refused_with(&toy().text("general.type", "adapter"), &["general.type", "\"adapter\""]);
    for key in ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"] {
        let key = format!("llama.{key}");
        refused_with(&toy().without(&key), &[&key, "missing", "UINT32"]);
        refused_with(&toy().set(&key, INT8, vec![4]), &[&key, "UINT32", "INT8 4"]);
        refused_with(&toy().text(&key, "4"), &[&key, "UINT32", "STRING"]);
        refused_with(&toy().set(&key, ARRAY, ints(&[4, 4])), &[&key, "UINT32", "an array of 2 INT32"]);
        refused_with(&toy().u32(&key, 0), &[&key, "got 0"]);
        refused_with(&toy().u32(&key, u32::MAX), &[&key, "got 4294967295"]);
    }
    refused_with(&toy().u32("llama.block_count", 1 << 20), &["llama.block_count", "11 tensors", "got 1048576"]);
    refused_with(&toy().u32("llama.attention.head_count_kv", 3), &["head_count_kv", "head_count = 8", "got 3"]);
    refused_with(&toy().u32("llama.attention.head_count", 6), &["head_count", "got 6"]);
    refused_with(&toy().u32("llama.attention.key_length", 5), &["key_length", "even", "got 5"]);
    refused_with(&toy().u32("llama.attention.value_length", 8), &["value_length", "expected 4", "got 8"]);
    refused_with(&toy().u32("llama.rope.dimension_count", 2), &["rope.dimension_count", "expected 4", "got 2"]);
    refused_with(&toy().u32("llama.vocab_size", 9), &["llama.vocab_size", "expected 8", "got 9"]);
    let eps = "llama.attention.layer_norm_rms_epsilon";
    refused_with(&toy().without(eps), &[eps, "missing"]);
    for value in [0.0, -1e-5, f32::NAN, f32::INFINITY] {
        refused_with(&toy().f32(eps, value), &[eps, &format!("got {value}")]);
    }
    refused_with(&toy().u32("llama.expert_count", 8), &["llama.expert_used_count", "expert_count = 8, got 0"]);
    refused_with(&toy().f32("llama.logit_scale", 0.5), &["llama.logit_scale", "does not know this key"]);
    refused_with(&toy().u32("general.quantization_version", 1), &["general.quantization_version", "expected 2, got 1"]);
    open(&toy().u32("llama.expert_count", 0).u32("llama.attention.key_length", 4).bytes()).unwrap();
}

#[test]
fn f048_tensors_and_keys_must_fit() {
    refused_with(&toy().without_tensor("token_embd.weight"), &["token_embd.weight", "got none"]);
    refused_with(&toy().without_tensor("blk.0.ffn_up.weight"), &["block_count", "10 tensors", "got 1"]);
    let bias = toy().tensor("blk.0.attn_q.bias", &[32], F32, floats(&[0.0; 32]));
    refused_with(&bias, &["blk.0.attn_q.bias", "no tensor of that name"]);
    let renamed = toy().change("blk.0.ffn_up.weight", |t| t.name = b"blk.0.ffn_upp.weight".to_vec());
    refused_with(
        &renamed,
        &["blk.0.ffn_upp.weight: expected no tensor", "blk.0.ffn_up.weight: expected a tensor, got none"],
    );
    // At most ten differences are listed.
    let narrow = toy().u32("llama.embedding_length", 16).u32("llama.attention.head_count", 4);
    refused_with(&narrow, &["; and 1 more"]);
}

#[test]
fn f077_rotary_keys_are_honoured_or_refused() {
    let theta = |w: Writer| {
        let (file, _folder) = open(&w.bytes()).unwrap();
        match file.config() {
            ModelConfig::Llama(c) => c.rope_theta,
            _ => panic!("not a llama"),
        }
    };
    assert_eq!(theta(toy()), 10000.0);
    assert_eq!(theta(toy().f32("llama.rope.freq_base", 5e5)), 5e5);
    assert_eq!(theta(toy().text("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 1.0)), 10000.0);
    for value in [0.0, -1.0, f32::NAN] {
        refused_with(&toy().f32("llama.rope.freq_base", value), &["llama.rope.freq_base", &format!("got {value}")]);
    }
}

#[test]
fn f079_non_finite_scales_are_refused_on_reading() {
    let name = "blk.0.ffn_down.weight";
    let hf = "model.layers.0.mlp.down_proj.weight";
    for (scale, what) in [(0x7e00u16, "NaN"), (0x7c00, "inf"), (0xfc00, "-inf")] {
        // 32 rows of one Q4_0 block; the scale of row 3 is bad, and its codes are 9: value 1 * scale.
        let mut data = [&half::f16::from_f32(0.5).to_le_bytes()[..], &[0x99; 16]].concat().repeat(32);
        data[3 * 18..3 * 18 + 2].copy_from_slice(&scale.to_le_bytes());
        let change = |t: &mut Tensor| (t.ty, t.data) = (Q4_0, data);
        let (file, _folder) = open(&toy().change(name, change).bytes()).unwrap();
        let e = file.read_f32(hf).unwrap_err();
        assert_eq!(e.exit_code(), 6);
        let message = e.to_string();
        for part in [hf, name, "32 non-finite", what, "index 96"] {
            assert!(message.contains(part), "{part:?} is missing in: {message}");
        }
        assert_eq!(file.read_f32("model.norm.weight").unwrap(), [0.0; 32], "other tensors can be read");
        let faults = dsq_checkpoint::Checkpoint::open(file.path()).unwrap().faults();
        assert!(faults.iter().any(|f| f.field.contains(hf) && f.problem.contains("non-finite")), "{faults:?}");
    }
}

#[test]
fn f026_a_file_that_shrinks_is_an_error() {
    let (file, folder) = open(&toy().bytes()).unwrap();
    std::fs::File::options().write(true).open(folder.path().join("toy.gguf")).unwrap().set_len(600).unwrap();
    assert_eq!(file.read_f32("model.norm.weight").unwrap_err().exit_code(), 4);
    assert_eq!(file.sha256("model.norm.weight").unwrap_err().exit_code(), 4);
    assert_eq!(file.read_f32("no such").unwrap_err().exit_code(), 3);
}

/// Claims of a file of at most 64 bytes. They run in a process of their own whose address space is limited, so that an
/// allocation by a claimed size would abort it.
#[test]
fn c047_small_files_with_large_claims() {
    const CHILD: &str = "DSQ_TEST_C047_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let exe = std::env::current_exe().unwrap();
        let status = std::process::Command::new("sh")
            .args(["-c", "ulimit -v 524288; exec \"$0\" --exact c047_small_files_with_large_claims"])
            .arg(exe)
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    let head =
        |n_tensors: u64, n_kv: u64| [b"GGUF\x03\0\0\0", &n_tensors.to_le_bytes()[..], &n_kv.to_le_bytes()].concat();
    let key = |ty: u32, rest: &[u8]| [&head(0, 1)[..], &string("k"), &ty.to_le_bytes(), rest].concat();
    let array_of = |ty: u32, n: u64| [&ty.to_le_bytes()[..], &n.to_le_bytes()].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("metadata_kv_count", head(0, 1 << 63)),
        ("tensor_count", head(1 << 40, 0)),
        ("key 0", [&head(0, 1)[..], &(1u64 << 62).to_le_bytes(), &[0; 6]].concat()),
        ("k", key(ARRAY, &array_of(UINT8, 1 << 40))),
        ("k", key(ARRAY, &array_of(ARRAY, 100))),
        ("k", key(STRING, &(1u64 << 62).to_le_bytes())),
        ("t", [&head(1, 0)[..], &string("t"), &u32::MAX.to_le_bytes(), &[0; 20]].concat()),
    ];
    for (field, bytes) in cases {
        assert!(bytes.len() <= 64);
        // The best of three: other work on the machine is not this file's fault.
        let fastest = (0..3)
            .map(|_| {
                let started = std::time::Instant::now();
                let message = refused(&bytes);
                assert!(message.contains(&format!("toy.gguf: {field}: ")), "{message}");
                started.elapsed()
            })
            .min();
        assert!(fastest.unwrap() < std::time::Duration::from_millis(50), "{field}: {fastest:?}");
    }
}
