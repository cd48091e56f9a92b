//! Packed against padded runs of sequences of mixed lengths: `packing MODEL [THREADS] [ROUNDS]`. Lengths as in batches of texts beside
//! pictures and sounds: 5 to 40 text tokens, 196 or 576 patches, 1500 frames; the tokens are random, since only their number counts here.
//! The last token of each is predicted. Both ways run in turns; the median ratio of the rounds counts, and the logits must be the same
//! bits. A measurement, no test.

use dsq_checkpoint::Checkpoint;
use dsq_eval::padding;
use dsq_runtime::{Continuation, KvType, LlamaRuntime, Packing, Prediction, RuntimeError, packed, padded};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Instant;

/// Sequences of a padded batch.
const BATCH: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("expected MODEL [THREADS] [ROUNDS]")?;
    let number = |i: usize, otherwise| args.get(i).map_or(Ok(otherwise), |a| a.parse::<usize>());
    let (threads, rounds) = (number(1, 2)?, number(2, 5)?.max(1));
    let model = LlamaRuntime::load(&Checkpoint::open(path.as_ref())?, threads)?;
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let text = |rng: &mut ChaCha8Rng| rng.random_range(5..=40);
    let mut texts_and_pictures: Vec<usize> = (0..26).map(|_| text(&mut rng)).chain([196; 4]).chain([576; 2]).collect();
    let mut all: Vec<usize> =
        (0..27).map(|_| text(&mut rng)).chain([196; 2]).chain([576; 1]).chain([1500; 2]).collect();
    texts_and_pictures.shuffle(&mut rng);
    all.shuffle(&mut rng);
    let texts: Vec<usize> = (0..64).map(|_| text(&mut rng)).collect();
    println!(
        "batches of {BATCH}; {threads} threads; median of {rounds} rounds in turns; {}",
        model.kernels().last().map_or("", |k| &k.1)
    );
    for (name, lengths) in [("texts", texts), ("texts, pictures", texts_and_pictures), ("texts, pictures, sounds", all)]
    {
        if lengths.iter().any(|l| *l > model.config().max_position_embeddings) {
            println!("{name}: left out, the model has {} positions", model.config().max_position_embeddings);
            continue;
        }
        let vocab = model.config().vocab_size as u32;
        let mut some = |len: usize| (0..=len).map(|_| rng.random_range(0..vocab)).collect();
        let groups: Vec<Vec<Continuation>> =
            lengths.iter().map(|&len| vec![Continuation { tokens: some(len), from: len, cut: 0 }]).collect();
        let (mut ratios, mut rates) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (mut ours, mut theirs) = (vec![Vec::new(); groups.len()], vec![Vec::new(); groups.len()]);
            let keep = |out: &mut Vec<Vec<u32>>, rows: &[Prediction], logits: &[f32]| {
                for (row, logits) in rows.iter().zip(logits.chunks_exact(vocab as usize)) {
                    out[row.group] = logits.iter().map(|x| x.to_bits()).collect();
                }
                Ok::<(), RuntimeError>(())
            };
            let start = Instant::now();
            packed(&model, &groups, Packing::default(), &mut |r, l| keep(&mut ours, r, l))?;
            let packed_seconds = start.elapsed().as_secs_f64();
            let start = Instant::now();
            padded(&model, &groups, (BATCH, 0, KvType::F32), &mut |r, l| keep(&mut theirs, r, l))?;
            ratios.push(start.elapsed().as_secs_f64() / packed_seconds);
            rates.push(lengths.iter().sum::<usize>() as f64 / packed_seconds);
            assert!(ours == theirs, "packed and padded logits differ");
        }
        let median = |v: &mut Vec<f64>| {
            v.sort_unstable_by(f64::total_cmp);
            v[v.len() / 2]
        };
        let share = padding(&lengths, BATCH).share();
        println!(
            "{name}: {} sequences, {} positions, padding share {:.1}% ({:.1} times the positions); packed {:.2} times as fast \
             as padded, {:.0} positions a second",
            lengths.len(),
            lengths.iter().sum::<usize>(),
            100.0 * share,
            1.0 / (1.0 - share),
            median(&mut ratios),
            median(&mut rates)
        );
    }
    Ok(())
}
