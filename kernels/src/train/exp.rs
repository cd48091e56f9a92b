//! `e^x` for f32 that the compiler can vectorise. Not correctly rounded: within 2 ulp on [-87, 88], to which `x` is
//! clamped (so never 0 and never infinite); NaN stays NaN. Reduction by ln 2 in two parts, degree 7 Taylor polynomial
//! on |r| <= ln(2)/2 (its truncation is below 2^-29).

#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer that sits in the low mantissa bits.
    const MAGIC: f32 = 12_582_912.0;
    /// ln 2 with 9 trailing zero bits, so that `k * LN2_HI` is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let c = x.clamp(-87.0, 88.0);
    let t = c * std::f32::consts::LOG2_E + MAGIC;
    let k = t - MAGIC;
    let r = (c - k * LN2_HI) - k * LN2_LO;
    let p = 1.0 / 720.0 + r * (1.0 / 5040.0);
    let p = 1.0 / 120.0 + r * p;
    let p = 1.0 / 24.0 + r * p;
    let p = 1.0 / 6.0 + r * p;
    let p = 0.5 + r * p;
    let p = 1.0 + (r + r * r * p);
    let y = f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23));
    if x.is_nan() { x } else { y }
}
