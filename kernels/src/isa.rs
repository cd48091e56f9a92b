//! Which instruction set a kernel runs on: found once at run time, and no better than [`MAX_ISA`] allows. Every kernel asks here. Not
//! the kernels themselves (see `simd`).

use std::sync::OnceLock;

/// The environment variable that keeps kernels below what the CPU has, to measure or to test what another CPU would run: one of
/// [`MAX_ISA_NAMES`]. (The float matrix products of training are another library's and do not know it.)
pub const MAX_ISA: &str = "DSQ_MAX_ISA";

/// What [`MAX_ISA`] may be, each with what is before it: plain Rust; AVX2 with FMA and F16C; AVX-VNNI; AVX-512F; AVX-512BW with VNNI.
pub const MAX_ISA_NAMES: [&str; 5] = ["scalar", "avx2", "avxvnni", "avx512", "avx512vnni"];

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
    /// The best path of this CPU that is allowed.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::supported().pop().unwrap_or(Isa::Scalar))
    }

    /// Every path that this CPU can run and that is allowed, slowest first.
    pub fn supported() -> Vec<Self> {
        let found = [(Isa::Scalar, true), (Isa::Avx2, has_avx2()), (Isa::Avx512, has_avx512())];
        found.into_iter().filter(|(_, has)| *has).map(|(isa, _)| isa).collect()
    }

    /// The name, and why this path was chosen.
    pub fn describe(self) -> String {
        let why = |lacks: &str| match std::env::var(MAX_ISA) {
            Ok(max) => format!("{MAX_ISA} is {max}"),
            Err(_) => format!("this CPU has no {lacks}"),
        };
        match self {
            Isa::Scalar => format!("scalar ({})", why("AVX2 with FMA and F16C")),
            Isa::Avx2 => format!("avx2 ({})", why("AVX-512F")),
            Isa::Avx512 => "avx512".into(),
        }
    }

    /// Whether [`MAX_ISA`] is absent or one of its names; a kernel takes anything else for absent.
    ///
    /// # Errors
    /// What is wrong, with both values.
    pub fn check_max() -> Result<(), String> {
        match std::env::var_os(MAX_ISA) {
            Some(got) if !MAX_ISA_NAMES.iter().any(|name| got == *name) => {
                Err(format!("{MAX_ISA}: expected one of {}, got {got:?}", MAX_ISA_NAMES.join(", ")))
            }
            _ => Ok(()),
        }
    }
}

/// Whether [`MAX_ISA`] allows the instructions of that place in [`MAX_ISA_NAMES`].
fn allows(level: usize) -> bool {
    static MAX: OnceLock<usize> = OnceLock::new();
    let named = || MAX_ISA_NAMES.iter().position(|name| std::env::var(MAX_ISA).is_ok_and(|max| max == *name));
    level <= *MAX.get_or_init(|| named().unwrap_or(MAX_ISA_NAMES.len()))
}

/// Defines what asks for features of x86-64, which other CPUs lack: the lowest place in [`MAX_ISA_NAMES`] that allows them.
macro_rules! features {
    ($($(#[$doc:meta])* $name:ident: $level:literal, $($feature:tt),+;)*) => {$(
        $(#[$doc])*
        #[inline]
        #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
        pub(crate) fn $name() -> bool {
            #[cfg(target_arch = "x86_64")]
            return allows($level) $(&& is_x86_feature_detected!($feature))+;
            #[cfg(not(target_arch = "x86_64"))]
            false
        }
    )*};
}

/// NEON with dot products of eight-bit integers: anything above plain Rust allows it.
#[cfg(target_arch = "aarch64")]
pub(crate) fn has_dotprod() -> bool {
    allows(1) && std::arch::is_aarch64_feature_detected!("dotprod")
}

features! {
    /// AVX2, FMA and F16C: who has the first has the others.
    has_avx2: 1, "avx2", "fma", "f16c";
    /// The 256-bit dot products of eight-bit integers in their own encoding.
    has_avx_vnni: 2, "avx2", "fma", "f16c", "avxvnni";
    /// AVX-512F beside AVX2, FMA and F16C.
    has_avx512: 3, "avx2", "fma", "f16c", "avx512f";
    /// The 512-bit dot products of eight-bit integers.
    has_avx512_vnni: 4, "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni";
}
