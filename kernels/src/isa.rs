//! Which instruction set a kernel runs on: found once at run time. Not the kernels themselves (see `simd`).

use std::sync::OnceLock;

/// An instruction set path. Every path gives the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust; any CPU.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512F (with AVX2, FMA and F16C).
    Avx512,
}

impl Isa {
    /// The best path of this CPU.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::supported().pop().unwrap_or(Isa::Scalar))
    }

    /// Every path that this CPU can run, slowest first.
    pub fn supported() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut found = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            found.push(Isa::Avx2);
            if is_x86_feature_detected!("avx512f") {
                found.push(Isa::Avx512);
            }
        }
        found
    }

    /// The name, and why this path was chosen.
    pub fn describe(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar (this CPU has no AVX2 with FMA and F16C)",
            Isa::Avx2 => "avx2 (this CPU has no AVX-512F)",
            Isa::Avx512 => "avx512",
        }
    }
}
