//! The rules of ARCHITECTURE.md that a program can check: layers, dependencies with a reason, file heads and sizes,
//! the one home of `unsafe`. Not style: rustfmt and clippy do that.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Package name -> its manifest.
fn manifests() -> BTreeMap<String, toml::Table> {
    let mut dirs = vec![root(), root().join("kernels")];
    dirs.extend(std::fs::read_dir(root().join("crates")).unwrap().map(|e| e.unwrap().path()));
    dirs.iter()
        .map(|dir| {
            let text = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
            let manifest: toml::Table = text.parse().unwrap();
            (manifest["package"]["name"].as_str().unwrap().to_string(), manifest)
        })
        .collect()
}

fn dependencies(manifest: &toml::Table, section: &str) -> Vec<String> {
    manifest.get(section).and_then(|d| d.as_table()).map_or(Vec::new(), |d| d.keys().cloned().collect())
}

/// The table "Crates and layers" of ARCHITECTURE.md: package -> (layer, packages of ours that it may name).
fn layers() -> BTreeMap<String, (u32, BTreeSet<String>)> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    text.lines()
        .filter_map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let layer = cells.first()?.parse().ok()?;
            let ours = cells.get(3)?.split(',').map(|s| s.trim().trim_matches('`').to_string()).collect();
            Some((cells[1].trim_matches('`').to_string(), (layer, ours)))
        })
        .collect()
}

#[test]
fn crates_depend_only_downwards_and_as_the_table_says() {
    let layers = layers();
    let manifests = manifests();
    assert_eq!(layers.keys().collect::<Vec<_>>(), manifests.keys().collect::<Vec<_>>(), "table against packages");
    for (name, manifest) in &manifests {
        let (layer, allowed) = &layers[name];
        for dep in dependencies(manifest, "dependencies").iter().filter(|d| d.starts_with("dsq-")) {
            assert!(allowed.contains(dep), "{name} names {dep}; ARCHITECTURE.md allows {allowed:?}");
            assert!(layers[dep].0 < *layer, "{name} (layer {layer}) names {dep} (layer {})", layers[dep].0);
        }
    }
}

#[test]
fn only_model_and_train_name_burn() {
    for (name, manifest) in manifests() {
        let burn = dependencies(&manifest, "dependencies").iter().any(|d| d.starts_with("burn"));
        assert_eq!(burn, ["dsq-model", "dsq-train"].contains(&name.as_str()), "{name}");
    }
}

#[test]
fn every_direct_dependency_has_a_line_saying_why() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let used: BTreeSet<String> = manifests()
        .values()
        .flat_map(|m| [dependencies(m, "dependencies"), dependencies(m, "dev-dependencies")].concat())
        .filter(|d| !d.starts_with("dsq-"))
        .collect();
    let declared = dependencies(manifests()["dsq"]["workspace"].as_table().unwrap(), "dependencies");
    for dep in declared.iter().filter(|d| !d.starts_with("dsq-")) {
        assert!(used.contains(dep), "{dep} is declared in the workspace and used nowhere");
    }
    for dep in used {
        assert!(text.contains(&format!("\n- `{dep}`: ")), "ARCHITECTURE.md says nothing of {dep}");
    }
}

fn rust_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            rust_files(&path, out);
        } else if name.ends_with(".rs") {
            out.push(path);
        }
    }
}

#[test]
fn files_say_what_they_are_stay_short_and_keep_unsafe_in_kernels() {
    let mut files = Vec::new();
    rust_files(&root(), &mut files);
    assert!(files.len() > 20, "found only {} source files", files.len());
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(root()).unwrap().display();
        assert!(text.starts_with("//!"), "{name} does not open with //!");
        let code = text.split("\n#[cfg(test)]").next().unwrap().lines().count();
        let in_tests = path.components().any(|c| c.as_os_str() == "tests");
        assert!(in_tests || code <= 800, "{name} has {code} lines before its tests");
        if !path.starts_with(root().join("kernels")) && !in_tests {
            let words = text.lines().filter(|l| !l.trim_start().starts_with("//"));
            assert!(
                !words.into_iter().any(|l| l.contains("unsafe {") || l.contains("unsafe fn")),
                "{name} has unsafe code"
            );
        }
    }
}
