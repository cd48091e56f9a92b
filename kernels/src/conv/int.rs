//! Convolution of quantized pictures with integer weights: codes in, exact i32 sums out. INT8 weights take a byte each, INT4
//! ones and narrower half a byte. The scales, the bias and the requantization belong to the runtime's layer.
//!
//! Shapes: codes `[m, h, w, c]`, sums `[m, oh, ow, n]`. Layout: NHWC codes as u8 (`code - qmin`, 0..=15 for INT4 and
//! 0..=255 for INT8); weights in `[n/8, k/4, 8, 4]` order, those of four bits two to a byte, unpacked once a call. Requires:
//! nothing; AVX2 is detected at run time. Order: irrelevant, integer sums are exact: weights whose sums could leave i32 are
//! refused. Error: none: both paths give `sum (code - zero) * weight` exactly.
//! Cost: with AVX2 and weights of four bits one multiply-add of 32 products for every 1.5 loads, where 16-bit sums are widened
//! before they can overflow; with INT8 weights, two products of which do not fit 16 bits, two of 16 products.

use super::{BLOCK, ConvShape, im2col, kernel_order};
use dsq_quant::{Granularity, Mapping, QParams, QuantArgs, QuantError, QuantizedMatrix};
use rayon::prelude::*;
use std::borrow::Cow;

/// Outputs of a weight panel.
const LANES: usize = 8;
/// Consecutive values of `k` that one 32-bit lane multiplies.
const QUAD: usize = 4;

/// Bits of a field that holds the code of a narrow weight.
const FIELD: usize = 4;

/// Codes of weights, `[n/8, k/4, 8, 4]`.
#[derive(Debug, Clone)]
enum Panels {
    /// Codes + 8, low nibble first.
    Nibbles(Vec<u8>),
    /// Codes.
    Bytes(Vec<i8>),
}

/// A convolution's integer weights in kernel layout, with the grid of its input.
#[derive(Debug, Clone)]
pub struct IntConv {
    shape: ConvShape,
    panels: Panels,
    /// `sum over k of the weight codes`, for each output: what a zero point of 1 takes away.
    row_sums: Vec<i32>,
    /// Input zero point as u8 code.
    zero: u8,
    /// Largest u8 input code.
    amax: u8,
    /// No sum of some products of an output is larger in magnitude.
    largest_sum: i64,
}

impl IntConv {
    /// Packs symmetric per-channel or per-tensor integer weights `[n, c * kh * kw]` (the order of the stored `[n, c, kh, kw]`).
    ///
    /// # Errors
    /// [`QuantError::Setting`] for other weight or activation arguments, and for weights whose sums could leave i32 (with INT8
    /// on both sides not before 65,794 products); [`QuantError::Length`] when matrix and shape disagree.
    pub fn new(w: &QuantizedMatrix, shape: ConvShape, input: &QuantArgs, p: QParams) -> Result<Self, QuantError> {
        let setting =
            |field, expected: &str, got: String| QuantError::Setting { field, expected: expected.into(), got };
        if w.args.qtype.float().is_some()
            || w.args.mapping != Mapping::Symmetric
            || matches!(w.args.granularity, Granularity::PerGroup(_))
        {
            return Err(setting("weights", "symmetric integers, per channel or per tensor", format!("{:?}", w.args)));
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
        let at = |j: usize, l: usize| ((j / LANES * k.div_ceil(QUAD) + l / QUAD) * LANES + j % LANES) * QUAD + l % QUAD;
        let mut panels = vec![0i8; n.div_ceil(LANES) * k.div_ceil(QUAD) * LANES * QUAD];
        for (j, row) in codes.chunks_exact(k).enumerate() {
            row.iter().enumerate().for_each(|(l, &q)| panels[at(j, l)] = q);
        }
        let panels = match w.args.qtype.bits() > FIELD {
            true => Panels::Bytes(panels),
            false => {
                Panels::Nibbles(panels.chunks_exact(2).map(|q| (q[0] + 8) as u8 | ((q[1] + 8) as u8) << 4).collect())
            }
        };
        let row_sums = codes.chunks_exact(k).map(|r| r.iter().map(|&q| i32::from(q)).sum()).collect();
        let (qmin, qmax) = (input.qtype.qmin(), input.qtype.qmax());
        let (zero, amax) = ((p.zero - qmin) as u8, (qmax - qmin) as u8);
        // Whatever is added up in whatever order, codes of the input or codes less their zero point.
        let magnitude = |r: &[i8]| r.iter().map(|&q| i64::from(q.unsigned_abs())).sum::<i64>();
        let magnitude = codes.chunks_exact(k).map(magnitude).max().unwrap_or(0);
        if magnitude * i64::from(amax) > i64::from(i32::MAX) {
            let got = format!("weight codes of {magnitude} in magnitude for an output, with inputs up to {amax}");
            return Err(setting("weights", "products that add up to less than 2^31, for sums in 32 bits", got));
        }
        let largest_sum = magnitude * i64::from(zero.max(amax - zero));
        Ok(Self { shape, panels, row_sums, zero, amax, largest_sum })
    }

    /// The geometry.
    pub fn shape(&self) -> &ConvShape {
        &self.shape
    }

    /// A bound of the magnitude of every sum of products `(code - zero) * weight` of one output: all of them, or some. Where it
    /// is at most 2^24, the same sums in f32 are exact in any order.
    pub fn largest_sum(&self) -> i64 {
        self.largest_sum
    }

    /// Bytes that the weights hold.
    pub fn resident_bytes(&self) -> usize {
        let weights = match &self.panels {
            Panels::Nibbles(p) => p.len(),
            Panels::Bytes(p) => p.len(),
        };
        weights + self.row_sums.len() * 4
    }

    /// Which path runs, and why.
    pub fn describe(&self) -> &'static str {
        match (&self.panels, crate::isa::has_avx2()) {
            (Panels::Nibbles(_), true) => "weights in 4 bits x u8 codes, AVX2 maddubs",
            (Panels::Nibbles(_), false) => "weights in 4 bits x u8 codes, scalar (no AVX2)",
            (Panels::Bytes(_), true) => "weights in 8 bits x u8 codes, AVX2 madd",
            (Panels::Bytes(_), false) => "weights in 8 bits x u8 codes, scalar (no AVX2)",
        }
    }

    /// The sums `[m, oh, ow, n]` of `(code - zero) * weight`; outside a picture the input is exactly 0.
    ///
    /// # Panics
    /// When `codes` is not `m` pictures, or holds a code above the input's range.
    pub fn forward(&self, codes: &[u8], m: usize) -> Vec<i32> {
        self.run(codes, m, crate::isa::has_avx2())
    }

    /// [`IntConv::forward`] by the scalar reference.
    ///
    /// # Panics
    /// As [`IntConv::forward`].
    pub fn forward_scalar(&self, codes: &[u8], m: usize) -> Vec<i32> {
        self.run(codes, m, false)
    }

    fn run(&self, codes: &[u8], m: usize, fast: bool) -> Vec<i32> {
        let s = &self.shape;
        assert_eq!(codes.len(), m * s.input_len(), "codes of {m} pictures");
        // A code above the range could overflow the 16-bit sums.
        assert!(codes.iter().fold(0u8, |a, &c| a.max(c)) <= self.amax, "code above {}", self.amax);
        let (n, kp) = (s.n, s.k().div_ceil(QUAD) * QUAD);
        let weights: Cow<[i8]> = match &self.panels {
            Panels::Nibbles(p) => p.iter().flat_map(|b| [(b & 0xf) as i8 - 8, (b >> 4) as i8 - 8]).collect(),
            Panels::Bytes(p) => p.into(),
        };
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

    /// Quads whose 16-bit pair sums cannot overflow: of weights in four bits each adds at most `2 * amax * 8` in magnitude. `None`
    /// of wider weights: a single pair can overflow.
    fn widen_after(&self) -> Option<usize> {
        let narrow = matches!(self.panels, Panels::Nibbles(_));
        narrow.then(|| (i16::MAX as usize / (2 * 8 * usize::from(self.amax))).max(1))
    }
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
/// AVX2; `col` whole rows of `kp`, `out` as many rows of `n`, `w` all panels; `widen` quads cannot overflow 16 bits (`None`: one
/// could).
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2_product(col: &[u8], w: &[i8], out: &mut [i32], n: usize, kp: usize, widen: Option<usize>) {
    let rows = col.len() / kp;
    let mut r = 0;
    while r < rows {
        let take = (rows - r).min(4);
        for j in (0..n).step_by(LANES) {
            // SAFETY: rows r .. r + take exist, and the panel of outputs j .. j + 8 is whole (padded with zeros).
            unsafe {
                let (a, b) = (col.as_ptr().add(r * kp), w.as_ptr().add(j * kp));
                let mut sums = [[0i32; LANES]; 4];
                match (take, widen) {
                    (4, Some(widen)) => avx2_tile::<4>(a, b, kp, widen, &mut sums),
                    (3, Some(widen)) => avx2_tile::<3>(a, b, kp, widen, &mut sums),
                    (2, Some(widen)) => avx2_tile::<2>(a, b, kp, widen, &mut sums),
                    (_, Some(widen)) => avx2_tile::<1>(a, b, kp, widen, &mut sums),
                    (4, None) => avx2_wide_tile::<4>(a, b, kp, &mut sums),
                    (3, None) => avx2_wide_tile::<3>(a, b, kp, &mut sums),
                    (2, None) => avx2_wide_tile::<2>(a, b, kp, &mut sums),
                    (_, None) => avx2_wide_tile::<1>(a, b, kp, &mut sums),
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

/// [`avx2_tile`] of weights in eight bits: products of 16-bit factors, added in pairs to 32 bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn avx2_wide_tile<const R: usize>(a: *const u8, b: *const i8, kp: usize, sums: &mut [[i32; LANES]; 4]) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's contract: R rows of kp codes at a, kp / 4 quads of 32 weights at b.
    unsafe {
        // Outputs 0 to 3 and 4 to 7, two sums of each (of the first and the last two values of a quad).
        let mut total = [[_mm256_setzero_si256(); 2]; R];
        for q in 0..kp / QUAD {
            let w = _mm256_loadu_si256(b.add(q * LANES * QUAD).cast());
            let w =
                [_mm256_castsi256_si128(w), _mm256_extracti128_si256::<1>(w)].map(|half| _mm256_cvtepi8_epi16(half));
            for (r, total) in total.iter_mut().enumerate() {
                let quad = _mm_set1_epi32(a.add(r * kp + q * QUAD).cast::<i32>().read_unaligned());
                let x = _mm256_cvtepu8_epi16(quad);
                for (total, w) in total.iter_mut().zip(w) {
                    *total = _mm256_add_epi32(*total, _mm256_madd_epi16(x, w));
                }
            }
        }
        for (total, sums) in total.iter().zip(sums) {
            // Pairs added: outputs 0, 1, 4, 5 in the lower half, 2, 3, 6, 7 in the upper one; then put in order.
            let pairs = _mm256_hadd_epi32(total[0], total[1]);
            _mm256_storeu_si256(sums.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs));
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

    fn matrix(qtype: QuantType, codes: Vec<i8>, n: usize, k: usize) -> QuantizedMatrix {
        let args = QuantArgs { qtype, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) };
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
            let (four, eight) = ((QuantType::Int4, 16), (QuantType::Int8, 256));
            for ((wtype, span), (qtype, range)) in [(four, four), (four, eight), (eight, four), (eight, eight)] {
                for zero in [0, 5, range as i32 - 1] {
                    let k = s.k();
                    // Codes and values as extreme as they come: every smallest against every largest code somewhere.
                    let code =
                        |v: u32| if v.is_multiple_of(3) { wtype.qmin() } else { (v % span) as i32 + wtype.qmin() };
                    let codes: Vec<i8> = bytes(s.n * k, 1).map(|v| code(v) as i8).collect();
                    let x: Vec<u8> = bytes(m * s.input_len(), 2)
                        .map(|v| if v % 3 == 0 { (range - 1) as u8 } else { (v % range) as u8 })
                        .collect();
                    let input = activations(qtype);
                    let p = QParams { scale: 0.1, zero: zero + qtype.qmin() };
                    let conv = IntConv::new(&matrix(wtype, codes.clone(), s.n, k), s, &input, p).unwrap();
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
                    let largest = want.iter().map(|v| i64::from(v.abs())).max().unwrap();
                    assert!(largest > 0 && largest <= conv.largest_sum(), "{largest} {}", conv.largest_sum());
                    let case = format!("{s:?} {wtype:?} {qtype:?} {zero}");
                    assert_eq!(conv.forward_scalar(&x, m), want, "scalar {case}");
                    assert_eq!(conv.forward(&x, m), want, "{} {case}", conv.describe());
                }
            }
        }
    }

    #[test]
    fn narrow_codes_give_the_sums_of_the_same_codes_in_wider_fields() {
        let s = ConvShape { input: [7, 6], c: 5, n: 11, kernel: [3, 3], stride: 1, pad: 1 };
        let (input, p) = (activations(QuantType::Int4), QParams { scale: 0.1, zero: -8 });
        let x: Vec<u8> = bytes(2 * s.input_len(), 8).map(|v| (v % 16) as u8).collect();
        for (qtype, span) in [(QuantType::Int2, 4), (QuantType::Int3, 8)] {
            let codes = bytes(s.n * s.k(), 4).map(|v| (v % span) as i8 + qtype.qmin() as i8).collect();
            let narrow = matrix(qtype, codes, s.n, s.k());
            let conv = IntConv::new(&narrow, s, &input, p).unwrap();
            let sums = conv.forward(&x, 2);
            assert_eq!(sums, conv.forward_scalar(&x, 2));
            for wider in [QuantType::Int4, QuantType::Int8] {
                let wide = matrix(wider, narrow.codes.clone(), s.n, s.k());
                let wide = IntConv::new(&wide, s, &input, p).unwrap();
                assert_eq!(wide.forward(&x, 2), sums);
                assert_eq!(wide.resident_bytes() > conv.resident_bytes(), wider == QuantType::Int8);
            }
        }
    }

    #[test]
    fn the_widest_sums_do_not_overflow() {
        // All weights the smallest against all codes 255, k = 9 * 256: 16-bit sums would wrap after 8 quads, or at once.
        let s = ConvShape { input: [3, 3], c: 256, n: 8, kernel: [3, 3], stride: 1, pad: 0 };
        let (input, p) = (activations(QuantType::Int8), QParams { scale: 1.0, zero: -128 });
        for wtype in [QuantType::Int4, QuantType::Int8] {
            let least = wtype.qmin();
            let conv = IntConv::new(&matrix(wtype, vec![least as i8; 8 * s.k()], 8, s.k()), s, &input, p).unwrap();
            let sum = least * 255 * s.k() as i32;
            assert_eq!(conv.forward(&vec![255; s.input_len()], 1), vec![sum; 8]);
            assert_eq!(conv.largest_sum(), i64::from(-sum));
        }
    }

    #[test]
    fn sums_that_could_leave_32_bits_are_refused() {
        // 65,793 products of -128 and 255 are 2^31 - 128; one more does not fit.
        let input = activations(QuantType::Int8);
        for (c, fits) in [(65_793, true), (65_794, false)] {
            let s = ConvShape { input: [1, 1], c, n: 1, kernel: [1, 1], stride: 1, pad: 0 };
            let w = matrix(QuantType::Int8, vec![-128; c], 1, c);
            let conv = IntConv::new(&w, s, &input, QParams { scale: 1.0, zero: -128 });
            match conv {
                Ok(conv) => {
                    let x = vec![255; c];
                    let want = vec![-128 * 255 * c as i32];
                    assert!(fits && conv.forward(&x, 1) == want && conv.forward_scalar(&x, 1) == want);
                }
                Err(e) => assert!(!fits && e.to_string().contains("8421632") && e.to_string().contains("255"), "{e}"),
            }
        }
    }

    #[test]
    fn other_schemes_and_lengths_are_refused() {
        let s = ConvShape { input: [4, 4], c: 8, n: 4, kernel: [1, 1], stride: 1, pad: 0 };
        let p = QParams { scale: 1.0, zero: 0 };
        let input = activations(QuantType::Int4);
        let good = matrix(QuantType::Int4, vec![0; 32], 4, 8);
        assert!(IntConv::new(&good, s, &input, p).is_ok());
        let grouped =
            QuantizedMatrix { args: QuantArgs::int4(Granularity::PerGroup(8), FloatType::F32), ..good.clone() };
        assert!(matches!(IntConv::new(&grouped, s, &input, p), Err(QuantError::Setting { field: "weights", .. })));
        let short = matrix(QuantType::Int4, vec![0; 24], 3, 8);
        assert!(matches!(IntConv::new(&short, s, &input, p), Err(QuantError::Length { .. })));
        let big = ConvShape { kernel: [5, 5], ..s };
        assert!(matches!(IntConv::new(&good, big, &input, p), Err(QuantError::Setting { field: "convolution", .. })));
    }
}
