//! What decides whether a float computation gives the same bits: architecture, operating system, the CPU features
//! that kernels choose by, the first-level cache, and the system's math library. Not a benchmark and not an identity of a machine.

use serde::{Deserialize, Serialize};

/// The kind of machine that numbers were measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// `x86_64`, `aarch64`...
    pub arch: String,
    /// `linux`, `macos`...
    pub os: String,
    /// The features that any kernel chooses by and that this CPU has, sorted.
    pub features: Vec<String>,
    /// Size and ways of the first-level data cache, by which float GEMMs cut their sums; `unknown` where the system
    /// does not tell.
    pub l1: String,
    /// Fingerprint of `exp`, `ln`, `sin`, `cos`, `tanh` and `powf` as this system computes them.
    pub math: String,
}

impl Hardware {
    /// This machine.
    pub fn detect() -> Self {
        Self {
            arch: std::env::consts::ARCH.into(),
            os: std::env::consts::OS.into(),
            features: features(),
            l1: l1_cache(),
            math: math_fingerprint(),
        }
    }

    /// Why results of `self` and `other` may differ in their last bits; `None` when they may not.
    pub fn difference(&self, other: &Hardware) -> Option<String> {
        for (what, a, b) in [
            ("architecture", &self.arch, &other.arch),
            ("system", &self.os, &other.os),
            ("math library", &self.math, &other.math),
            ("first-level cache", &self.l1, &other.l1),
        ] {
            if a != b {
                return Some(format!("{what} {a} there, {b} here"));
            }
        }
        let only = |a: &Hardware, b: &Hardware| -> Vec<String> {
            a.features.iter().filter(|f| !b.features.contains(f)).cloned().collect()
        };
        let (there, here) = (only(self, other), only(other, self));
        if there.is_empty() && here.is_empty() {
            return None;
        }
        let list = |v: &[String]| if v.is_empty() { "nothing more".into() } else { v.join(" ") };
        Some(format!("CPU features: {} only there, {} only here", list(&there), list(&here)))
    }
}

/// The features of this CPU, out of those that dsq's kernels and the float GEMM of training choose by.
fn features() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    macro_rules! present {
        ($($name:tt),*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    #[cfg(target_arch = "x86_64")]
    let list =
        present!("avx", "avx2", "avx512bw", "avx512f", "avx512vl", "avx512vnni", "avxvnni", "f16c", "fma", "sse4.1");
    #[cfg(target_arch = "aarch64")]
    let list = [
        ("dotprod", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let list: [(&str, bool); 0] = [];
    let mut found: Vec<String> = list.iter().filter(|(_, has)| *has).map(|(name, _)| (*name).to_string()).collect();
    // What keeps kernels from some of them.
    found.extend(std::env::var("DSQ_MAX_ISA").map(|max| format!("DSQ_MAX_ISA={max}")));
    found
}

fn l1_cache() -> String {
    let read = |index: usize, what: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}");
        std::fs::read_to_string(path).ok().map(|s| s.trim().to_string())
    };
    (0..8)
        .find(|&i| {
            read(i, "level").as_deref() == Some("1") && read(i, "type").is_some_and(|t| t == "Data" || t == "Unified")
        })
        .and_then(|i| Some(format!("{} {}-way", read(i, "size")?, read(i, "ways_of_associativity")?)))
        .unwrap_or_else(|| "unknown".into())
}

/// FNV-1a over the bits of elementary functions at fixed points, 16 hex digits. These come from the system's math
/// library and differ between systems in their last bit.
fn math_fingerprint() -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut take = |bits: u64| {
        for byte in bits.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    // black_box: the functions must be those that run, not the compiler's folding of constants.
    for i in 0..2048u32 {
        let x = std::hint::black_box((f64::from(i) + 0.5) / 128.0);
        let y = std::hint::black_box(x as f32);
        for v in [(-y).exp(), y.ln(), y.sin(), y.cos(), (y / 8.0).tanh(), y.powf(0.3), (-y).exp_m1()] {
            take(u64::from(v.to_bits()));
        }
        for v in [(-x).exp(), x.ln(), x.sin(), x.cos(), x.powf(0.3)] {
            take(v.to_bits());
        }
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_equals_itself_and_differences_are_named() {
        let here = Hardware::detect();
        assert_eq!(here.difference(&Hardware::detect()), None);
        assert_eq!(here.math.len(), 16);
        let mut other = here.clone();
        other.features.push("avx1024".into());
        assert_eq!(other.difference(&here).unwrap(), "CPU features: avx1024 only there, nothing more only here");
        other.arch = "vax".into();
        assert!(other.difference(&here).unwrap().starts_with("architecture vax there"));
    }
}
