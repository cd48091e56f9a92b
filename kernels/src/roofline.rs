//! What this machine computes at best, measured as the kernels compute: chains of multiply-adds in registers, f32 and eight-bit
//! integers, and the time that handing a piece of work to the threads takes. With the read bandwidth (`bandwidth.rs`) it bounds every
//! operation. Not a model's speed.

use crate::linear::IntPath;
use crate::parallel::split;
use crate::simd::{Simd, dispatch};
use crate::{Isa, Team};
use std::hint::black_box;
use std::time::Instant;

/// Rates of this machine with a number of threads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Multiply-adds a second in f32.
    pub float: f64,
    /// Multiply-adds a second of eight-bit integers.
    pub int8: f64,
    /// Seconds to hand work to all threads and have it back.
    pub region: f64,
}

/// Independent sums: more than the latency of a multiply-add hides.
const CHAINS: usize = 12;
/// Multiply-adds of a chain in one pass.
const STEPS: usize = 100_000;

/// Measures [`Rates`] on a team of `threads`, the best of five passes each. Zeros when the threads cannot be started.
pub fn measure_rates(threads: usize) -> Rates {
    let Ok(team) = Team::new(threads) else { return Rates { float: 0.0, int8: 0.0, region: 0.0 } };
    let (isa, path) = (Isa::detect(), IntPath::of(Isa::detect()));
    let best = |count: f64, body: &(dyn Fn() + Sync)| {
        let pass = |_| {
            let start = Instant::now();
            team.enter(|| split(threads, 1, &|parts| parts.for_each(|_| body())));
            start.elapsed().as_secs_f64()
        };
        count * threads as f64 / (0..5).map(pass).fold(f64::INFINITY, f64::min)
    };
    let steps = (STEPS * CHAINS) as f64;
    // SAFETY: the paths were found on this CPU.
    let float = best(steps * crate::simd::LANES as f64, &|| unsafe { dispatch!(isa, fma_chains()) });
    let int8 = best(steps * path.products() as f64, &|| unsafe { int8_chains(path) });
    let regions = 1000;
    let pass = |_: usize| {
        let start = Instant::now();
        team.enter(|| (0..regions).for_each(|_| split(threads, 1, &|r| _ = black_box(r))));
        start.elapsed().as_secs_f64() / f64::from(regions)
    };
    Rates { float, int8, region: (0..5).map(pass).fold(f64::INFINITY, f64::min) }
}

/// Safety: the path's features.
#[inline(always)]
unsafe fn fma_chains<S: Simd>() {
    // SAFETY: arithmetic in registers.
    unsafe {
        let (a, b) = (S::splat(black_box(1.0)), S::splat(black_box(1e-9)));
        let mut sums = [S::splat(0.0); CHAINS];
        for _ in 0..STEPS {
            for s in &mut sums {
                *s = S::fma(*s, a, b);
            }
        }
        let mut out = [0.0f32; crate::simd::LANES];
        for s in sums {
            S::store(out.as_mut_ptr(), s);
            black_box(&out);
        }
    }
}

/// Safety: the path's features.
unsafe fn int8_chains(path: IntPath) {
    // SAFETY: forwarded.
    unsafe {
        match path {
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni512 => x86::vnni512(),
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni256 => x86::vnni256(),
            #[cfg(target_arch = "x86_64")]
            IntPath::Avx2 => x86::avx2(),
            _ => {
                let mut sums = [0i32; CHAINS];
                for i in 0..STEPS as i32 {
                    for s in &mut sums {
                        *s = s.wrapping_add(i.wrapping_mul(black_box(3)));
                    }
                }
                black_box(sums);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, STEPS};
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! chains {
        ($name:ident, $features:literal, $v:ty, $zero:ident, $set:ident, $step:expr) => {
            /// Safety: the features.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name() {
                let (a, b) = ($set(black_box(3)), $set(black_box(5)));
                let mut sums = [$zero(); CHAINS];
                for _ in 0..STEPS / 100 {
                    for _ in 0..100 {
                        for s in &mut sums {
                            *s = $step(*s, a, b);
                        }
                    }
                    // Keeps the passes from being summed up at compile time.
                    black_box(&mut sums);
                }
                black_box(sums);
            }
        };
    }
    chains!(
        vnni512,
        "avx512f,avx512bw,avx512vnni",
        __m512i,
        _mm512_setzero_si512,
        _mm512_set1_epi8,
        _mm512_dpbusd_epi32
    );
    chains!(vnni256, "avx2,avxvnni", __m256i, _mm256_setzero_si256, _mm256_set1_epi8, _mm256_dpbusd_avx_epi32);
    // The product is of the sum: of two constants it would be taken once, before the loop.
    chains!(avx2, "avx2", __m256i, _mm256_setzero_si256, _mm256_set1_epi8, |s, a, b| _mm256_add_epi16(
        a,
        _mm256_maddubs_epi16(s, b)
    ));
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_has_rates() {
        let r = super::measure_rates(1);
        assert!((1e7..1e14).contains(&r.float) && (1e7..1e14).contains(&r.int8), "{r:?}");
        assert!((0.0..1e-3).contains(&r.region), "{r:?}");
    }
}
