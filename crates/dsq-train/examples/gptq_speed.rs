//! How long GPTQ takes for one layer: `cargo run --release -p dsq-train --example gptq_speed [N K TOKENS GROUP]` (4096 4096
//! 65536 128), to be run beside `tests/conformance/bench_gptq.py` of the same sizes on the same cores. Not a test of what it
//! chooses.

use dsq_quant::{FloatType, Granularity, QuantArgs};
use dsq_train::ptq::{Factor, Hessian, gptq_quantize};
use std::time::Instant;

fn main() {
    let mut sizes = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let mut next = |default| sizes.next().unwrap_or(default);
    let (n, k, tokens, group) = (next(4096), next(4096), next(65_536), next(128));
    let mut s = 0x9E37_79B9_7F4A_7C15u64;
    let mut normal = |len: usize| -> Vec<f32> {
        let mut uniform = || {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..len).map(|_| (0..4).map(|_| uniform()).sum::<f32>() - 2.0).collect()
    };
    let (w, x) = (normal(n * k), normal(2048 * k));
    let mut h = Hessian::new(k);
    let clock = Instant::now();
    for _ in 0..tokens.div_ceil(2048) {
        h.add(&x);
    }
    let hessian = clock.elapsed().as_secs_f64();
    let clock = Instant::now();
    let factor = Factor::new(&h);
    let factored = clock.elapsed().as_secs_f64();
    let clock = Instant::now();
    let args = QuantArgs::int4(Granularity::PerGroup(group), FloatType::F16);
    let (_, fit) = gptq_quantize(&w, n, k, &h, factor.as_ref(), args).expect("finite weights");
    let columns = clock.elapsed().as_secs_f64();
    let total = hessian + factored + columns;
    println!(
        "[{n}, {k}] group {group}, {tokens} tokens: Hessian {hessian:.1} s, factor {factored:.1} s, codes {columns:.1} s, \
         together {total:.1} s; error {:.3} of rounding's",
        fit.error / fit.rtn_error
    );
}
