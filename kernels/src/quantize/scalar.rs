//! The reference walk: `dsq_quant`'s formula, value by value. Not fast.

use dsq_quant::{QParams, QuantArgs};

pub(super) fn choose_codes(w: &[f32], args: &QuantArgs, p: QParams, codes: &mut [i8]) {
    for (&x, code) in w.iter().zip(codes) {
        *code = args.quantize(x, p);
    }
}
