//! The reference walk: `dsq_quant`'s formula, value by value. Not fast.

use super::Range;
use dsq_quant::{QParams, QuantArgs};

pub(super) fn range(x: &[f32]) -> Range {
    x.iter().fold(super::empty(), |r, &v| Range { lo: r.lo.min(v), hi: r.hi.max(v), finite: r.finite && v.is_finite() })
}

pub(super) fn walk(x: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32], inside: &mut [u8]) {
    for ((&x, out), inside) in x.iter().zip(out).zip(inside) {
        let (value, passes) = args.fake_quantize(x, p);
        *out = value;
        *inside = u8::from(passes);
    }
}
