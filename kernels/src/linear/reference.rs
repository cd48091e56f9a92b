//! The scalar reference of a quantized linear layer: plain loops over the codes, no layout, no threads. Slow.

use super::layout::SEGMENT;
use dsq_quant::QuantizedMatrix;

/// `out [m, n] = x [m, k] * dequantize(W)^T` in the order of the header of [`crate::linear`]: the fast paths are
/// tested bit-equal to this.
pub fn matmul_reference(w: &QuantizedMatrix, x: &[f32], m: usize, out: &mut [f32]) {
    for t in 0..m {
        for row in 0..w.n {
            let mut total = 0.0f32;
            for (group, start) in (0..w.k).step_by(w.group_len().max(1)).enumerate() {
                let p = w.qparams(w.scale_index(row, group));
                let end = (start + w.group_len()).min(w.k);
                for from in (start..end).step_by(SEGMENT) {
                    let mut part = 0.0f32;
                    for i in from..end.min(from + SEGMENT) {
                        let q = w.args.code_value(w.codes[row * w.k + i], p.zero);
                        part = q.mul_add(x[t * w.k + i], part);
                    }
                    total = p.scale.mul_add(part, total);
                }
            }
            out[t * w.n + row] = total;
        }
    }
}
