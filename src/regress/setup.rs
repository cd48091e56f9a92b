//! What measures: version, device, kernels, dependencies, machine. Not how it is compared (see `dsq_eval::Setup`).

use crate::{Global, commands::doctor, error::CliError};
use dsq_eval::{Hardware, Setup};
use std::collections::BTreeMap;

/// This build on this machine.
///
/// # Errors
/// Exit code 70 for a kernel that cannot be asked.
pub fn detect(global: &Global) -> Result<Setup, CliError> {
    let kernels = doctor::kernels()?;
    Ok(Setup {
        dsq: env!("CARGO_PKG_VERSION").into(),
        device: global.device.clone(),
        kernels: kernels.into_iter().map(|(kind, kernel)| (kind.into(), kernel)).collect(),
        dependencies: dependencies(include_str!("../../Cargo.toml"), include_str!("../../Cargo.lock")),
        hardware: Hardware::detect(),
    })
}

/// The versions that `lock` holds of the dependencies that `manifest` names for the workspace. Of a name with several versions, the one
/// that the manifest's requirement takes.
fn dependencies(manifest: &str, lock: &str) -> BTreeMap<String, String> {
    let table = |text: &str| text.parse::<toml::Table>().unwrap_or_default();
    let (manifest, lock) = (table(manifest), table(lock));
    let wanted = manifest.get("workspace").and_then(|w| w.get("dependencies")).and_then(toml::Value::as_table);
    let packages: Vec<(&str, &str)> = lock
        .get("package")
        .and_then(toml::Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|p| Some((p.get("name")?.as_str()?, p.get("version")?.as_str()?)))
        .collect();
    let mut out = BTreeMap::new();
    for (name, what) in wanted.into_iter().flatten() {
        // Those without a requirement are ours.
        let Some(required) = what.as_str().or_else(|| what.get("version")?.as_str()) else { continue };
        let required = required.trim_start_matches(['=', '^', '~']);
        let taken = packages.iter().find(|(n, v)| {
            n == name
                && v.strip_prefix(required).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '+', '-']))
        });
        if let Some((_, version)) = taken {
            out.insert(name.clone(), (*version).to_string());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direct_dependency_has_its_version() {
        let manifest = include_str!("../../Cargo.toml");
        let all = dependencies(manifest, include_str!("../../Cargo.lock"));
        let named = manifest.parse::<toml::Table>().unwrap();
        let wanted = named["workspace"]["dependencies"].as_table().unwrap();
        let outside = wanted.iter().filter(|(_, w)| w.get("path").is_none());
        for (name, _) in outside {
            assert!(all.contains_key(name), "{name}: {all:?}");
        }
        assert_eq!(all["burn"], "0.22.1");
        assert!(!all.contains_key("dsq-quant"));
    }

    #[test]
    fn of_two_versions_the_required_one_is_told() {
        let manifest = "[workspace.dependencies]\na = \"1\"\nb = { version = \"=0.9.2\" }\nc = { path = \"c\" }\n";
        let package = |name: &str, version: &str| format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        let lock =
            [package("a", "10.0.0"), package("a", "1.4.2"), package("b", "0.9.2"), package("c", "1.0.0")].concat();
        let want: BTreeMap<String, String> = [("a".into(), "1.4.2".into()), ("b".into(), "0.9.2".into())].into();
        assert_eq!(dependencies(manifest, &lock), want);
    }
}
