//! How fast attention reads keys and values when it decodes, and how many multiply-adds it does on a prompt. Not a test: it asserts
//! nothing.
//!
//!     cargo run --release -p dsq-kernels --example attention_speed [ROUNDS [HEADS KV_HEADS D [THREADS...]]]
//!
//! The shape is SmolLM2-135M's unless given: 9 heads, 3 of keys and values, 64 wide. Decode: one token of one sequence, through 30 layers
//! one after another, so that long caches do not stay in the processor. Of each layer, and of a prompt, the
//! best round counts, which other work on the machine changes least. `share` is of the bandwidth that reading alone reaches. Prints one JSON object a line.

use dsq_kernels::attention::{BLOCK, KvFormat, PagedLayer, Queries, attend};
use dsq_kernels::{Team, measure_read_bandwidth};
use dsq_quant::{KvGrid, QuantArgs, QuantType};
use std::time::Instant;

const LAYERS: usize = 30;
const PROMPT: usize = 512;

fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
}

fn seconds(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

struct Shape {
    heads: usize,
    kv_heads: usize,
    d: usize,
}

impl Shape {
    fn filled(&self, format: KvFormat, positions: usize) -> (PagedLayer, Vec<u32>) {
        let blocks = positions.div_ceil(BLOCK);
        let scale = 1.0 / (self.d as f32).sqrt();
        let mut layer = PagedLayer::new(blocks, self.kv_heads, [self.d; 2], scale, format);
        // Blocks in no order, as after many sequences.
        let step = (0..).map(|i| 7 + 2 * i).find(|s| gcd(*s, blocks) == 1).unwrap_or(1);
        let table: Vec<u32> = (0..blocks).map(|b| (b * step % blocks) as u32).collect();
        for t in 0..positions {
            let (k, v) = (wave(self.kv_heads * self.d, t), wave(self.kv_heads * self.d, t + 1));
            layer.put(&table, t, &k, &v);
        }
        (layer, table)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let number = |i: usize, default: usize| args.get(i).copied().unwrap_or(default);
    let rounds = number(0, 40);
    let shape = Shape { heads: number(1, 9), kv_heads: number(2, 3), d: number(3, 64) };
    let threads = if args.len() > 4 { args[4..].to_vec() } else { vec![1, 2] };
    let grid = |t| KvGrid::from_absmax(QuantArgs::kv_cache(t).expect("a scheme"), 1.0, 1.0).expect("a grid");
    let formats = [
        ("f32", KvFormat::F32),
        ("f16", KvFormat::F16),
        ("int8", KvFormat::Codes(grid(QuantType::Int8))),
        ("fp8", KvFormat::Codes(grid(QuantType::Fp8E4M3))),
        ("int8, dynamic", KvFormat::Dynamic(QuantArgs::kv_int8())),
        ("fp8, dynamic", KvFormat::Dynamic(QuantArgs::kv_fp8())),
    ];
    let teams: Vec<Team> = threads.iter().map(|&t| Team::new(t).expect("threads")).collect();
    let row = shape.heads * shape.d;
    for (name, format) in formats {
        for positions in [64, 256, 1024, 4096, 4112, 8192] {
            let (layer, table) = shape.filled(format, positions);
            let layers: Vec<PagedLayer> = (0..LAYERS).map(|_| layer.clone()).collect();
            let (q, mut out) = (wave(row, 1), vec![0.0; row]);
            let queries = [Queries { table: &table, past: positions - 1, tokens: 1 }];
            let bytes = (LAYERS * 2 * shape.kv_heads * shape.d * positions * format.bytes()) as f64;
            for team in &teams {
                let mut best = [f64::INFINITY; LAYERS];
                let mut read = 0.0f64;
                for round in 0..rounds {
                    if round % 4 == 0 {
                        read = read.max(measure_read_bandwidth(team.threads()));
                    }
                    team.enter(|| {
                        for (layer, best) in layers.iter().zip(&mut best) {
                            *best = best.min(seconds(|| attend(layer, &queries, &q, shape.heads, &mut out)));
                        }
                    });
                }
                let time = best.iter().sum::<f64>();
                let share = bytes / time / read;
                println!(
                    "{{\"decode\": \"{name}\", \"positions\": {positions}, \"threads\": {}, \"us_per_layer\": {:.1}, \
                     \"gb_per_s\": {:.2}, \"share\": {share:.2}}}",
                    team.threads(),
                    time * 1e6 / LAYERS as f64,
                    bytes / time / 1e9,
                );
            }
        }
    }
    for (name, format) in formats {
        let (mut layer, table) = shape.filled(format, PROMPT);
        let (k, v) = (wave(PROMPT * shape.kv_heads * shape.d, 1), wave(PROMPT * shape.kv_heads * shape.d, 2));
        let queries = [Queries { table: &table, past: 0, tokens: PROMPT }];
        for team in &teams {
            let mut best = f64::INFINITY;
            for _ in 0..rounds {
                team.enter(|| best = best.min(seconds(|| layer.put_rows(&queries, &k, &v))));
            }
            let ns = best * 1e9 / (k.len() + v.len()) as f64;
            println!("{{\"put\": \"{name}\", \"threads\": {}, \"ns_per_value\": {ns:.2}}}", team.threads());
        }
    }
    for (name, format) in formats {
        for past in [0, 3584] {
            let (layer, table) = shape.filled(format, past + PROMPT);
            let (q, mut out) = (wave(PROMPT * row, 1), vec![0.0; PROMPT * row]);
            let queries = [Queries { table: &table, past, tokens: PROMPT }];
            let work = (past + 1..=past + PROMPT).sum::<usize>() * 2 * row;
            for team in &teams {
                let mut best = f64::INFINITY;
                for _ in 0..rounds {
                    team.enter(|| best = best.min(seconds(|| attend(&layer, &queries, &q, shape.heads, &mut out))));
                }
                println!(
                    "{{\"prefill\": \"{name}\", \"past\": {past}, \"tokens\": {PROMPT}, \"threads\": {}, \
                     \"gmacs_per_s\": {:.1}}}",
                    team.threads(),
                    work as f64 / best / 1e9,
                );
            }
        }
    }
}
