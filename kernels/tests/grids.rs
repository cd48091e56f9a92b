//! Every scheme, on a thousand random matrices each: fake quantization, fast rounding and the reference give the same bits;
//! and the reconstruction error is that of the best codes in f64. Not the adversarial cases beside each kernel.

use dsq_kernels::fake_quant::fake_quant_weight;
use dsq_kernels::quantize::quantize;
use dsq_quant::{FloatType, Granularity, Mapping, QuantArgs, QuantError, QuantType, QuantizedMatrix, WeightObserver};

const SEEDS: u64 = 1000;
const GROUP: usize = 11;

struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(n)) >> 32) as u32
    }

    /// In [-0.5, 0.5).
    fn uniform(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 24) as f32 - 0.5
    }

    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum()
    }
}

/// A small matrix: its shape, size of values, sign, outliers, zeros and near ties depend on the seed.
fn matrix(seed: u64) -> (Vec<f32>, usize, usize) {
    let mut r = Random::new(seed);
    let (n, k) = (1 + r.below(3) as usize, GROUP * (1 + r.below(4) as usize));
    let magnitude = 10f32.powi(r.below(9) as i32 - 5);
    let kind = r.below(6);
    let step = magnitude / 8.0;
    let w = (0..n * k)
        .map(|i| {
            let x = r.normal() * magnitude;
            match kind {
                0 => x.abs(),
                1 => -x.abs() - magnitude,
                2 if i % 13 == 5 => x * 40.0,
                3 if i / GROUP % 2 == 1 => 0.0,
                4 => ((x / step).round() + 0.5) * step,
                _ => x,
            }
        })
        .collect();
    (w, n, k)
}

fn schemes() -> Vec<QuantArgs> {
    let mut out = Vec::new();
    for qtype in QuantType::INTS {
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(GROUP)] {
                for scale_dtype in FloatType::ALL {
                    for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                        out.push(QuantArgs { qtype, granularity, mapping, scale_dtype, observer });
                    }
                }
            }
        }
    }
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn training_rounding_and_reference_agree_bit_for_bit_over_a_thousand_seeds_for_every_scheme() {
    let mut refused = 0;
    for args in schemes() {
        for seed in 0..SEEDS {
            let (w, n, k) = matrix(seed);
            let want = QuantizedMatrix::quantize(&w, n, k, args);
            let (mut out, mut inside) = (vec![f32::NAN; w.len()], vec![9u8; w.len()]);
            let faked = fake_quant_weight(&w, n, k, &args, &mut out, &mut inside);
            let want = match want {
                Ok(q) => q,
                Err(e) => {
                    // Only an f16 scale can overflow here.
                    assert!(
                        matches!(e, QuantError::ScaleOverflow { dtype: FloatType::F16, .. }),
                        "{args:?} {seed}: {e}"
                    );
                    assert_eq!((faked.unwrap_err(), quantize(&w, n, k, args).unwrap_err()), (e.clone(), e));
                    refused += 1;
                    continue;
                }
            };
            faked.unwrap();
            assert_eq!(quantize(&w, n, k, args).unwrap(), want, "{args:?} {seed}");
            assert_eq!(bits(&out), bits(&want.dequantize()), "{args:?} {seed}");
            let per_scale = w.len() / want.scales.len();
            for (i, (&x, &m)) in w.iter().zip(&inside).enumerate() {
                assert_eq!(args.fake_quantize(x, want.qparams(i / per_scale)).1, m == 1, "{args:?} {seed} {i}");
            }
        }
    }
    assert!(refused < SEEDS as usize, "{refused}");
}

/// The least squared error of a group that the rule of `args` allows, in f64: the scale from the range (stored), and for
/// each value the best of *all* codes. Written from docs/numerics.md, independently of `dsq_quant`'s f32 steps.
fn best_error(x: &[f32], args: &QuantArgs) -> f64 {
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let (lo, hi) = x.iter().fold((0.0f64, 0.0f64), |(l, h), &v| (l.min(v), h.max(v)));
    let half = 2f64.powi(args.qtype.bits() as i32 - 1);
    let steps = 2.0 * half - 1.0;
    let error = |share: f64| {
        let (lo, hi) = (lo * share, hi * share);
        let (scale, zero) = match args.mapping {
            Mapping::Symmetric => ((-lo).max(hi) / (steps / 2.0), 0.0),
            Mapping::Asymmetric => {
                let scale = (hi - lo) / steps;
                (scale, (-half - lo / scale).clamp(-half, half - 1.0).round_ties_even())
            }
        };
        let scale = f64::from(args.scale_dtype.round(scale as f32));
        let codes = || (0..2 * half as i64).map(|i| i as f64 - half);
        x.iter().map(|v| codes().map(|q| ((q - zero) * scale - v).powi(2)).fold(f64::INFINITY, f64::min)).sum::<f64>()
    };
    match args.observer {
        WeightObserver::MinMax => error(1.0),
        WeightObserver::Mse => (0..31).map(|i| error(1.0 - 0.02 * f64::from(i))).fold(f64::INFINITY, f64::min),
    }
}

#[test]
fn the_reconstruction_error_is_that_of_the_best_codes_in_f64_for_every_scheme() {
    let (n, k) = (6, 8 * GROUP);
    let mut r = Random::new(77);
    let normal: Vec<f32> = (0..n * k).map(|_| r.normal()).collect();
    // Weights of one sign are where a zero point of the wrong domain shows most.
    let shifted: Vec<f32> = normal.iter().map(|v| v * 0.3 + 1.5).collect();
    let negative: Vec<f32> = shifted.iter().map(|v| -v).collect();
    for args in schemes() {
        for (what, w) in [("normal", &normal), ("positive", &shifted), ("negative", &negative)] {
            let q = QuantizedMatrix::quantize(w, n, k, args).unwrap();
            let values = q.dequantize();
            let ours: f64 = values.iter().zip(w).map(|(v, x)| (f64::from(*v) - f64::from(*x)).powi(2)).sum();
            let best: f64 = w.chunks(w.len() / q.scales.len()).map(|x| best_error(x, &args)).sum();
            assert!((ours / best - 1.0).abs() < 1e-3, "{what} {args:?}: {ours} against {best}");
            // Measured for normal weights under one scale, the worst case, and a little above.
            let size: f64 = w.iter().map(|&x| f64::from(x).powi(2)).sum();
            let relative = (ours / size).sqrt();
            let most = [0.0, 0.0, 0.63, 0.31, 0.15, 0.0, 0.0, 0.0, 0.01][args.qtype.bits()];
            assert!(relative < most, "{what} {args:?}: {relative}");
        }
    }
}
