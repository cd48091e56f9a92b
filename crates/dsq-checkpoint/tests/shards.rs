//! Sharded folders: an index and files that do not fit each other are refused before any weight is read, by name. Not
//! their configs (see `folders.rs`).

mod fixtures;

use dsq_checkpoint::{Checkpoint, NamedTensor, Severity, TensorData, write_safetensors};
use dsq_quant::FloatType;
use fixtures::folder::{Model, check, shard};
use fixtures::{f32_file, llama};
use serde_json::json;

#[test]
fn a_sharded_folder_reads_as_the_single_file() {
    let (single, sharded) = (Model::float(&llama(true)), Model::sharded());
    let (a, b) = (single.open().unwrap(), sharded.open().unwrap());
    assert_eq!(a.names().len(), b.names().len());
    for name in a.names() {
        assert_eq!(a.read_f32(&name).unwrap(), b.read_f32(&name).unwrap(), "{name}");
        assert_eq!(a.sha256(&name).unwrap(), b.sha256(&name).unwrap(), "{name}");
    }
    assert!(b.faults().is_empty(), "{:?}", b.faults());
}

#[test]
fn f028_all_missing_shards_are_listed() {
    let model = Model::sharded();
    std::fs::remove_file(model.path(&shard(1))).unwrap();
    std::fs::remove_file(model.path(&shard(3))).unwrap();
    check(model.open(), &["2 of 3 shards", &shard(1), &shard(3)]);
}

#[test]
fn f029_c043_shard_names_that_are_paths() {
    let model = Model::sharded();
    // A valid file outside, which must not be opened.
    std::fs::write(model.dir.parent().unwrap().join("model.safetensors"), f32_file(&[("x", 1)])).unwrap();
    let good = model.index();
    for bad in [
        json!("../model.safetensors"),
        json!("/etc/passwd"),
        json!("a/../../b"),
        json!("sub/x.safetensors"),
        json!("C:\\x"),
        json!("x\u{0}y"),
        json!(""),
        json!(".."),
        json!(7),
        json!(null),
    ] {
        let mut index = good.clone();
        index["weight_map"]["model.norm.weight"] = bad.clone();
        model.write_index(&index);
        check(model.open(), &["weight_map.model.norm.weight", "plain file name"]);
    }
}

#[cfg(unix)]
#[test]
fn f030_c043_symlinks_that_leave_the_folder() {
    let model = Model::sharded();
    let outside = model.dir.parent().unwrap().join("elsewhere");
    std::fs::rename(model.path(&shard(2)), &outside).unwrap();
    std::os::unix::fs::symlink(&outside, model.path(&shard(2))).unwrap();
    check(model.open(), &[&shard(2), "symlink leaves the folder"]);
    std::fs::remove_file(model.path(&shard(2))).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", model.path(&shard(2))).unwrap();
    check(model.open(), &[&shard(2), "symlink"]);
    std::fs::remove_file(model.path(&shard(2))).unwrap();
    // Inside the folder it is fine.
    std::fs::rename(&outside, model.path("real.data")).unwrap();
    std::os::unix::fs::symlink("real.data", model.path(&shard(2))).unwrap();
    model.open().unwrap();
    // And in the layout of the Hugging Face cache.
    let cache = model.dir.parent().unwrap().join("models--a--b");
    std::fs::create_dir_all(cache.join("snapshots")).unwrap();
    std::fs::create_dir_all(cache.join("blobs")).unwrap();
    std::fs::rename(model.path("real.data"), cache.join("blobs/abc")).unwrap();
    std::fs::remove_file(model.path(&shard(2))).unwrap();
    std::os::unix::fs::symlink("../../blobs/abc", model.path(&shard(2))).unwrap();
    std::fs::rename(&model.dir, cache.join("snapshots/rev")).unwrap();
    Checkpoint::open(&cache.join("snapshots/rev")).unwrap();
}

#[test]
fn f031_index_and_shards_that_disagree() {
    let model = Model::sharded();
    let good = model.index();
    let mut index = good.clone();
    index["weight_map"]["ghost"] = json!(shard(2));
    model.write_index(&index);
    check(model.open(), &["ghost", &shard(2), "lacks"]);
    let mut index = good.clone();
    let (name, _) = good["weight_map"].as_object().unwrap().iter().find(|(_, s)| **s == json!(shard(1))).unwrap();
    index["weight_map"].as_object_mut().unwrap().remove(name);
    model.write_index(&index);
    check(model.open(), &[name, &shard(1), "does not name"]);
    // A tensor in two shards.
    model.write_index(&good);
    let x = NamedTensor {
        name: "model.norm.weight".into(),
        data: TensorData::Float { shape: vec![64], data: vec![0.0; 64], dtype: FloatType::F32 },
    };
    let at = good["weight_map"]["model.norm.weight"].as_str().unwrap();
    let other = (1..=3).map(shard).find(|s| s != at).unwrap();
    write_safetensors(&model.path(&other), &[x]).unwrap();
    check(model.open(), &["lacks"]);
}

#[test]
fn f032_f033_stale_sizes_and_files() {
    let model = Model::sharded();
    let mut index = model.index();
    index["metadata"]["total_size"] = json!(12);
    model.write_index(&index);
    std::fs::write(model.path("model-00004-of-00004.safetensors"), f32_file(&[("old", 1)])).unwrap();
    let faults = model.open().unwrap().faults();
    assert!(faults.iter().any(|f| f.field == "metadata.total_size" && f.problem.contains("got 12")), "{faults:?}");
    assert!(faults.iter().any(|f| f.file.ends_with("model-00004-of-00004.safetensors")), "{faults:?}");
    assert!(faults.iter().all(|f| f.severity == Severity::Warning));
    // Which one counts when both are there is never guessed.
    std::fs::write(model.path("model.safetensors"), f32_file(&[("old", 1)])).unwrap();
    check(model.open(), &["both model.safetensors and model.safetensors.index.json"]);
}

#[test]
fn f034_an_index_that_is_none() {
    let model = Model::sharded();
    let path = model.path("model.safetensors.index.json");
    for (text, word) in [
        ("", "not valid JSON"),
        ("[]", "weight_map"),
        ("{\"weight_map\": []}", "weight_map"),
        ("{\"weight_map\": {}}", "weight_map"),
        ("{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}", "occurs twice"),
    ] {
        std::fs::write(&path, text).unwrap();
        check(model.open(), &["index.json", word]);
    }
}

#[test]
fn f035_a_pointer_or_a_page_in_place_of_a_shard() {
    let model = Model::sharded();
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n", "0".repeat(64));
    std::fs::write(model.path(&shard(2)), pointer).unwrap();
    check(model.open(), &[&shard(2), "Git LFS pointer"]);
    std::fs::write(model.path(&shard(2)), "<!DOCTYPE html>\n<html><body>404</body></html>").unwrap();
    check(model.open(), &[&shard(2), "HTML page"]);
}

#[test]
fn c041_a_shard_that_is_cut_or_longer() {
    let model = Model::sharded();
    let path = model.path(&shard(2));
    let whole = std::fs::read(&path).unwrap();
    for len in [whole.len() - 4096, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        check(model.open(), &[&shard(2), &whole.len().to_string(), &len.to_string()]);
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    check(model.open(), &[&shard(2), "after the last tensor"]);
}
