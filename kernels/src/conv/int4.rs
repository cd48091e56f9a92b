//! Convolution of quantized pictures with INT4 weights, or INT3 and INT2 in the same fields of four bits: integer codes in,
//! exact i32 sums out. The scales, the bias and the requantization belong to the runtime's layer.
//!
//! Shapes: codes `[m, h, w, c]`, sums `[m, oh, ow, n]`. Layout: NHWC codes as u8 (`code - qmin`, 0..=15 for INT4 and
//! 0..=255 for INT8); weights packed two to a byte in `[n/8, k/4, 8, 4]` order, unpacked once a call. Requires: nothing;
//! AVX2 is detected at run time. Order: irrelevant, integer sums are exact. Error: none: both paths give
//! `sum (code - zero) * weight` exactly.
//! Cost: with AVX2 one multiply-add of 32 products for every 1.5 loads; 16-bit sums are widened before they can overflow.

use super::{BLOCK, ConvShape, im2col, kernel_order};
use dsq_quant::{Granularity, Mapping, QParams, QuantArgs, QuantError, QuantizedMatrix};
use rayon::prelude::*;

/// Outputs of a weight panel.
const LANES: usize = 8;
/// Consecutive values of `k` that one 32-bit lane multiplies.
const QUAD: usize = 4;

/// Bits of a field that holds a weight's code.
const FIELD: usize = 4;

/// A convolution's weights of at most four bits in kernel layout, with the grid of its input.
#[derive(Debug, Clone)]
pub struct Int4Conv {
    shape: ConvShape,
    /// `[n/8, k/4, 8, 4]` codes + 8, low nibble first.
    packed: Vec<u8>,
    /// `sum over k of the weight codes`, for each output: what a zero point of 1 takes away.
    row_sums: Vec<i32>,
    /// Input zero point as u8 code.
    zero: u8,
    /// Largest u8 input code.
    amax: u8,
}

impl Int4Conv {
    /// Packs symmetric per-channel or per-tensor INT4, INT3 or INT2 weights `[n, c * kh * kw]` (the order of the stored `[n, c, kh, kw]`).
    ///
    /// # Errors
    /// [`QuantError::Setting`] for other weight or activation arguments, [`QuantError::Length`] when matrix and shape
    /// disagree.
    pub fn new(w: &QuantizedMatrix, shape: ConvShape, input: &QuantArgs, p: QParams) -> Result<Self, QuantError> {
        let setting =
            |field, expected: &str, got: String| QuantError::Setting { field, expected: expected.into(), got };
        if w.args.qtype.float().is_some()
            || w.args.qtype.bits() > FIELD
            || w.args.mapping != Mapping::Symmetric
            || matches!(w.args.granularity, Granularity::PerGroup(_))
        {
            return Err(setting(
                "weights",
                "symmetric INT4, INT3 or INT2, per channel or per tensor",
                format!("{:?}", w.args),
            ));
        }
        if input.granularity != Granularity::PerTensor || input.qtype.float().is_some() {
            return Err(setting("activations", "integers with one static scale for the tensor", format!("{input:?}")));
        }
        if !shape.is_valid() {
            return Err(setting("convolution", "a kernel that fits the padded picture", format!("{shape:?}")));
        }
        w.validate()?;
        if (w.n, w.k) != (shape.n, shape.k()) {
            return Err(QuantError::Length { what: "weight", expected: shape.n * shape.k(), got: w.n * w.k });
        }
        let codes = kernel_order(&w.codes, &shape);
        let (n, k) = (shape.n, shape.k());
        let quads = k.div_ceil(QUAD);
        let mut packed = vec![0x88u8; n.div_ceil(LANES) * quads * LANES * QUAD / 2];
        for (j, row) in codes.chunks_exact(k).enumerate() {
            for (l, &q) in row.iter().enumerate() {
                let at = ((j / LANES * quads + l / QUAD) * LANES + j % LANES) * QUAD + l % QUAD;
                let shift = at % 2 * 4;
                packed[at / 2] = packed[at / 2] & !(0xf << shift) | ((q + 8) as u8) << shift;
            }
        }
        let row_sums = codes.chunks_exact(k).map(|r| r.iter().map(|&q| i32::from(q)).sum()).collect();
        let qmin = input.qtype.qmin();
        Ok(Self { shape, packed, row_sums, zero: (p.zero - qmin) as u8, amax: (input.qtype.qmax() - qmin) as u8 })
    }

    /// The geometry.
    pub fn shape(&self) -> &ConvShape {
        &self.shape
    }

    /// Bytes that the weights hold.
    pub fn resident_bytes(&self) -> usize {
        self.packed.len() + self.row_sums.len() * 4
    }

    /// Which path runs, and why.
    pub fn describe(&self) -> &'static str {
        if avx2() {
            "weights in 4 bits x u8 codes, AVX2 maddubs"
        } else {
            "weights in 4 bits x u8 codes, scalar (no AVX2)"
        }
    }

    /// The sums `[m, oh, ow, n]` of `(code - zero) * weight`; outside a picture the input is exactly 0.
    ///
    /// # Panics
    /// When `codes` is not `m` pictures, or holds a code above the input's range.
    pub fn forward(&self, codes: &[u8], m: usize) -> Vec<i32> {
        self.run(codes, m, avx2())
    }

    /// [`Int4Conv::forward`] by the scalar reference.
    ///
    /// # Panics
    /// As [`Int4Conv::forward`].
    pub fn forward_scalar(&self, codes: &[u8], m: usize) -> Vec<i32> {
        self.run(codes, m, false)
    }

    fn run(&self, codes: &[u8], m: usize, fast: bool) -> Vec<i32> {
        let s = &self.shape;
        assert_eq!(codes.len(), m * s.input_len(), "codes of {m} pictures");
        // A code above the range could overflow the 16-bit sums.
        assert!(codes.iter().fold(0u8, |a, &c| a.max(c)) <= self.amax, "code above {}", self.amax);
        let (n, kp) = (s.n, s.k().div_ceil(QUAD) * QUAD);
        let weights: Vec<i8> = self.packed.iter().flat_map(|b| [(b & 0xf) as i8 - 8, (b >> 4) as i8 - 8]).collect();
        let mut out = vec![0i32; m * s.output_len()];
        out.par_chunks_mut(s.output_len()).zip(codes.par_chunks(s.input_len())).for_each_init(
            || vec![0u8; BLOCK * kp],
            |col, (out, x)| {
                for (b, out) in out.chunks_mut(BLOCK * n).enumerate() {
                    let rows = out.len() / n;
                    im2col(x, s, b * BLOCK, rows, self.zero, col, kp);
                    #[cfg(target_arch = "x86_64")]
                    if fast {
                        // SAFETY: AVX2 is present; `col` holds `rows` rows of `kp` codes, none above `amax`.
                        unsafe { avx2_product(&col[..rows * kp], &weights, out, n, kp, self.widen_after()) };
                    }
                    if !fast || !cfg!(target_arch = "x86_64") {
                        scalar_product(&col[..rows * kp], &weights, out, n, kp);
                    }
                    for row in out.chunks_exact_mut(n) {
                        for (o, sum) in row.iter_mut().zip(&self.row_sums) {
                            *o -= i32::from(self.zero) * sum;
                        }
                    }
                }
            },
        );
        out
    }

    /// Quads whose 16-bit pair sums cannot overflow: each adds at most `2 * amax * 8` in magnitude.
    fn widen_after(&self) -> usize {
        (i16::MAX as usize / (2 * 8 * usize::from(self.amax))).max(1)
    }
}

fn avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The reference: `out[r, j] = sum over l of col[r, l] * w[j, l]`, on the panel layout.
fn scalar_product(col: &[u8], w: &[i8], out: &mut [i32], n: usize, kp: usize) {
    for (row, out) in col.chunks_exact(kp).zip(out.chunks_exact_mut(n)) {
        for (j, out) in out.iter_mut().enumerate() {
            let panel = &w[j / LANES * kp * LANES..];
            *out = (0..kp)
                .map(|l| i32::from(row[l]) * i32::from(panel[(l / QUAD * LANES + j % LANES) * QUAD + l % QUAD]))
                .sum();
        }
    }
}

/// # Safety
/// AVX2; `col` whole rows of `kp`, `out` as many rows of `n`, `w` all panels; `widen` quads cannot overflow 16 bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_product(col: &[u8], w: &[i8], out: &mut [i32], n: usize, kp: usize, widen: usize) {
    let rows = col.len() / kp;
    let mut r = 0;
    while r < rows {
        let take = (rows - r).min(4);
        for j in (0..n).step_by(LANES) {
            // SAFETY: rows r .. r + take exist, and the panel of outputs j .. j + 8 is whole (padded with zeros).
            unsafe {
                let (a, b) = (col.as_ptr().add(r * kp), w.as_ptr().add(j * kp));
                let mut sums = [[0i32; LANES]; 4];
                match take {
                    4 => avx2_tile::<4>(a, b, kp, widen, &mut sums),
                    3 => avx2_tile::<3>(a, b, kp, widen, &mut sums),
                    2 => avx2_tile::<2>(a, b, kp, widen, &mut sums),
                    _ => avx2_tile::<1>(a, b, kp, widen, &mut sums),
                }
                let width = LANES.min(n - j);
                for (i, sums) in sums[..take].iter().enumerate() {
                    let at = (r + i) * n + j;
                    out[at..at + width].copy_from_slice(&sums[..width]);
                }
            }
        }
        r += take;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn avx2_tile<const R: usize>(a: *const u8, b: *const i8, kp: usize, widen: usize, sums: &mut [[i32; LANES]; 4]) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's contract: R rows of kp codes at a, kp / 4 quads of 32 weights at b.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut total = [_mm256_setzero_si256(); R];
        let quads = kp / QUAD;
        let mut q = 0;
        while q < quads {
            let end = quads.min(q + widen);
            let mut short = [_mm256_setzero_si256(); R];
            while q < end {
                let wv = _mm256_loadu_si256(b.add(q * LANES * QUAD).cast());
                for r in 0..R {
                    let av = _mm256_set1_epi32(a.add(r * kp + q * QUAD).cast::<i32>().read_unaligned());
                    short[r] = _mm256_add_epi16(short[r], _mm256_maddubs_epi16(av, wv));
                }
                q += 1;
            }
            for r in 0..R {
                total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(short[r], ones));
            }
        }
        for r in 0..R {
            _mm256_storeu_si256(sums[r].as_mut_ptr().cast(), total[r]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{FloatType, QuantType};

    fn bytes(len: usize, mut seed: u32) -> impl Iterator<Item = u32> {
        (0..len).map(move |_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 12
        })
    }

    fn matrix(codes: Vec<i8>, n: usize, k: usize) -> QuantizedMatrix {
        let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
        QuantizedMatrix { args, n, k, codes, scales: vec![0.5; n], zeros: vec![], global_scale: None }
    }

    fn activations(qtype: QuantType) -> QuantArgs {
        QuantArgs { qtype, mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) }
    }

    #[test]
    fn both_paths_equal_the_definition_exactly() {
        let shape = |input, c, n, kernel, stride, pad| ConvShape { input, c, n, kernel, stride, pad };
        for (m, s) in [
            (3, shape([9, 10], 8, 16, [3, 3], 1, 1)),
            (2, shape([9, 10], 16, 33, [3, 3], 2, 1)),
            (2, shape([5, 4], 1, 10, [3, 3], 1, 1)),
            (2, shape([14, 14], 16, 32, [1, 1], 2, 0)),
            (1, shape([7, 7], 64, 64, [3, 3], 1, 1)),
        ] {
            for (qtype, range) in [(QuantType::Int4, 16), (QuantType::Int8, 256)] {
                for zero in [0, 5, range as i32 - 1] {
                    let k = s.k();
                    // Codes and values as extreme as they come: every -8 against every largest code somewhere.
                    let codes: Vec<i8> =
                        bytes(s.n * k, 1).map(|v| if v % 3 == 0 { -8 } else { (v % 16) as i8 - 8 }).collect();
                    let x: Vec<u8> = bytes(m * s.input_len(), 2)
                        .map(|v| if v % 3 == 0 { (range - 1) as u8 } else { (v % range) as u8 })
                        .collect();
                    let input = activations(qtype);
                    let p = QParams { scale: 0.1, zero: zero + qtype.qmin() };
                    let conv = Int4Conv::new(&matrix(codes.clone(), s.n, k), s, &input, p).unwrap();
                    let mut want = Vec::new();
                    let [oh, ow] = s.output();
                    for i in 0..m {
                        for (oy, ox, o) in
                            (0..oh).flat_map(|y| (0..ow).flat_map(move |x| (0..s.n).map(move |o| (y, x, o))))
                        {
                            let mut sum = 0i32;
                            for c in 0..s.c {
                                for (ky, kx) in (0..s.kernel[0]).flat_map(|y| (0..s.kernel[1]).map(move |x| (y, x))) {
                                    let (y, xx) = (oy * s.stride + ky, ox * s.stride + kx);
                                    if (s.pad..s.input[0] + s.pad).contains(&y)
                                        && (s.pad..s.input[1] + s.pad).contains(&xx)
                                    {
                                        let at = ((i * s.input[0] + y - s.pad) * s.input[1] + xx - s.pad) * s.c + c;
                                        let w = codes[((o * s.c + c) * s.kernel[0] + ky) * s.kernel[1] + kx];
                                        sum += (i32::from(x[at]) - zero) * i32::from(w);
                                    }
                                }
                            }
                            want.push(sum);
                        }
                    }
                    assert_eq!(conv.forward_scalar(&x, m), want, "scalar {s:?} {qtype:?} {zero}");
                    assert_eq!(conv.forward(&x, m), want, "{} {s:?} {qtype:?} {zero}", conv.describe());
                }
            }
        }
    }

    #[test]
    fn narrower_codes_give_the_sums_of_the_same_codes_as_int4_and_wider_ones_are_refused() {
        let s = ConvShape { input: [7, 6], c: 5, n: 11, kernel: [3, 3], stride: 1, pad: 1 };
        let (input, p) = (activations(QuantType::Int4), QParams { scale: 0.1, zero: -8 });
        let x: Vec<u8> = bytes(2 * s.input_len(), 8).map(|v| (v % 16) as u8).collect();
        for (qtype, span) in [(QuantType::Int2, 4), (QuantType::Int3, 8)] {
            let codes = bytes(s.n * s.k(), 4).map(|v| (v % span) as i8 + qtype.qmin() as i8).collect();
            let wide = matrix(codes, s.n, s.k());
            let mut narrow = wide.clone();
            narrow.args.qtype = qtype;
            let want = Int4Conv::new(&wide, s, &input, p).unwrap().forward(&x, 2);
            let conv = Int4Conv::new(&narrow, s, &input, p).unwrap();
            assert_eq!((conv.forward(&x, 2), conv.forward_scalar(&x, 2)), (want.clone(), want));
        }
        let mut wide = matrix(vec![0; s.n * s.k()], s.n, s.k());
        wide.args.qtype = QuantType::Int8;
        assert!(matches!(Int4Conv::new(&wide, s, &input, p), Err(QuantError::Setting { field: "weights", .. })));
    }

    #[test]
    fn the_widest_sums_do_not_overflow() {
        // All weights -8 against all codes 255, k = 9 * 256: 16-bit sums would wrap after 8 quads.
        let s = ConvShape { input: [3, 3], c: 256, n: 8, kernel: [3, 3], stride: 1, pad: 0 };
        let input = activations(QuantType::Int8);
        let conv = Int4Conv::new(&matrix(vec![-8; 8 * s.k()], 8, s.k()), s, &input, QParams { scale: 1.0, zero: -128 })
            .unwrap();
        assert_eq!(conv.forward(&vec![255; s.input_len()], 1), vec![-8 * 255 * s.k() as i32; 8]);
    }

    #[test]
    fn other_schemes_and_lengths_are_refused() {
        let s = ConvShape { input: [4, 4], c: 8, n: 4, kernel: [1, 1], stride: 1, pad: 0 };
        let p = QParams { scale: 1.0, zero: 0 };
        let input = activations(QuantType::Int4);
        let good = matrix(vec![0; 32], 4, 8);
        assert!(Int4Conv::new(&good, s, &input, p).is_ok());
        let grouped =
            QuantizedMatrix { args: QuantArgs::int4(Granularity::PerGroup(8), FloatType::F32), ..good.clone() };
        assert!(matches!(Int4Conv::new(&grouped, s, &input, p), Err(QuantError::Setting { field: "weights", .. })));
        let short = matrix(vec![0; 24], 3, 8);
        assert!(matches!(Int4Conv::new(&short, s, &input, p), Err(QuantError::Length { .. })));
        let big = ConvShape { kernel: [5, 5], ..s };
        assert!(matches!(Int4Conv::new(&good, big, &input, p), Err(QuantError::Setting { field: "convolution", .. })));
    }
}
