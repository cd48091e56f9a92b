//! Packed runs against padded ones and single sequences, bit for bit, and against transformers' log-likelihoods
//! (tests/golden/tasks). Not the metrics of answers (see `dsq-eval`).

use dsq_checkpoint::{Checkpoint, ModelConfig};
use dsq_eval::{Answer, TaskFile, padding, task_metrics, token_scores};
use dsq_runtime::{
    Continuation, Continuations, KvType, LlamaRuntime, Logits, Packing, Prediction, Ran, RuntimeError, TextTokenizer,
    packed, padded,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn load(name: &str, threads: usize) -> LlamaRuntime {
    LlamaRuntime::load(&Checkpoint::open(&golden(name)).unwrap(), threads).unwrap()
}

/// The logits of every prediction, and whether those of each continuation came in order and once.
#[derive(Default, PartialEq, Debug)]
struct All(BTreeMap<(usize, usize), (usize, Vec<u32>)>);

impl All {
    fn take(&mut self, groups: &[Vec<Continuation>], rows: &[Prediction], logits: &[f32]) {
        let vocab = logits.len() / rows.len();
        for (row, logits) in rows.iter().zip(logits.chunks_exact(vocab)) {
            let from = groups[row.group][row.member].from;
            let (next, bits) = self.0.entry((row.group, row.member)).or_insert((from, Vec::new()));
            assert_eq!(*next, row.position, "{row:?}");
            *next += 1;
            bits.extend(logits.iter().map(|x| x.to_bits()));
        }
    }

    fn complete(&self, groups: &[Vec<Continuation>]) {
        for (g, group) in groups.iter().enumerate() {
            for (m, c) in group.iter().enumerate() {
                assert_eq!(self.0[&(g, m)].0, c.tokens.len(), "group {g}, member {m}");
            }
        }
    }
}

fn run_packed(model: &LlamaRuntime, groups: &[Vec<Continuation>], packing: Packing) -> (All, Ran) {
    let mut all = All::default();
    let ran = packed::<RuntimeError>(model, groups, packing, &mut |rows, logits| {
        all.take(groups, rows, logits);
        Ok(())
    });
    all.complete(groups);
    (all, ran.unwrap())
}

fn run_padded(model: &LlamaRuntime, groups: &[Vec<Continuation>], batch: usize) -> (All, Ran) {
    let mut all = All::default();
    let ran = padded::<RuntimeError>(model, groups, (batch, 0, KvType::F32), &mut |rows, logits| {
        all.take(groups, rows, logits);
        Ok(())
    });
    all.complete(groups);
    (all, ran.unwrap())
}

/// Each continuation alone, from an empty cache.
fn alone(model: &LlamaRuntime, groups: &[Vec<Continuation>]) -> All {
    let mut all = All::default();
    for (group, of) in groups.iter().enumerate() {
        for (member, c) in of.iter().enumerate() {
            let mut cache = model.new_cache(c.fed().len()).unwrap();
            let logits = model.forward(c.fed(), &mut cache, Logits::All).unwrap();
            let vocab = logits.len() / c.fed().len();
            let rows: Vec<Prediction> =
                (c.from..c.tokens.len()).map(|position| Prediction { group, member, position }).collect();
            all.take(groups, &rows, &logits[(c.from - 1) * vocab..]);
        }
    }
    all
}

fn given(groups: &[Vec<Continuation>]) -> Vec<usize> {
    groups.iter().flatten().map(|c| c.fed().len()).collect()
}

/// Groups as a task has them: a beginning that all share (of `root` tokens), one that a group shares, and ends of their own.
fn groups(rng: &mut ChaCha8Rng, count: usize, root: usize, vocab: u32) -> Vec<Vec<Continuation>> {
    let some = |rng: &mut ChaCha8Rng, n: usize| (0..n).map(|_| rng.random_range(0..vocab)).collect::<Vec<u32>>();
    let root = some(rng, root);
    let group = |rng: &mut ChaCha8Rng| {
        let len = rng.random_range(1..40);
        let context = [root.clone(), some(rng, len)].concat();
        let members = rng.random_range(0..5);
        (0..members)
            .map(|_| {
                // Some members have a context of their own, as in partial evaluation.
                let own = if rng.random_bool(0.3) { rng.random_range(1..6) } else { 0 };
                let (own, ends) = (some(rng, own), rng.random_range(1..9));
                let from = context.len() + own.len();
                Continuation { tokens: [context.clone(), own, some(rng, ends)].concat(), from, cut: 0 }
            })
            .collect()
    };
    (0..count).map(|_| group(rng)).collect()
}

#[test]
fn bits_are_those_of_a_sequence_alone_for_any_packing_batch_and_number_of_threads() {
    let names =
        ["llama_tiny", "mistral_tiny", "qwen2_tiny", "mixtral_tiny", "deepseek_v2_lite_tiny", "llama_tiny_untied"];
    for (i, name) in names.into_iter().enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(i as u64);
        let model = load(name, 1 + i % 3);
        for (count, root) in [(1, 0), (9, 0), (12, 37), (3, 15), (5, 16)] {
            let groups = groups(&mut rng, count, root, model.config().vocab_size as u32);
            let lengths = given(&groups);
            let want = alone(&model, &groups);
            for (share, positions) in [(true, 0), (true, 300), (true, 100_000), (false, 0), (false, 500)] {
                let packing = Packing { share, positions, ..Packing::default() };
                let (got, ran) = run_packed(&model, &groups, packing);
                assert!(got == want, "{name}: {count} groups behind {root} tokens, {packing:?}");
                assert_eq!(ran.given, lengths.iter().sum::<usize>());
                assert!(if share { ran.computed <= ran.given } else { ran.computed == ran.given }, "{ran:?}");
            }
            for batch in [1, 3, 16] {
                let (got, ran) = run_padded(&model, &groups, batch);
                assert!(got == want, "{name}: {count} groups behind {root} tokens, padded batches of {batch}");
                assert_eq!(ran.computed, padding(&lengths, batch).padded);
            }
        }
    }
}

#[test]
fn what_is_common_is_computed_once_and_every_step_is_full() {
    let model = load("llama_tiny", 1);
    let tokens = |n: usize, salt: u32| (0..n as u32).map(|i| (i * 7 + salt) % 128).collect::<Vec<_>>();
    // Two questions of 40 tokens behind 20 common ones, four answers of 5 tokens each, of which 4 are given.
    let question = |q: u32| {
        let context = [tokens(20, 0), vec![100 + q], tokens(39, 3 + q)].concat();
        (0..4).map(|a| Continuation { tokens: [context.clone(), vec![a; 5]].concat(), from: 60, cut: 0 }).collect()
    };
    let groups: Vec<Vec<Continuation>> = (0..2).map(question).collect();
    let (_, ran) = run_packed(&model, &groups, Packing::default());
    // The last token of a context belongs to the answers: its logits are wanted.
    assert_eq!((ran.given, ran.computed), (8 * 64, 20 + 2 * 39 + 8 * 5));
    let (_, ran) = run_packed(&model, &groups, Packing { share: false, ..Packing::default() });
    assert_eq!((ran.computed, ran.steps), (512, 512usize.div_ceil(192)), "three steps, two of them full");
    let none = packed::<RuntimeError>(&model, &[Vec::new()], Packing::default(), &mut |_, _| unreachable!()).unwrap();
    assert_eq!(none, Ran::default());
}

#[test]
fn errors_of_the_caller_and_of_the_model_end_the_run() {
    let model = load("llama_tiny", 1);
    let one = |len: usize| vec![vec![Continuation { tokens: vec![1; len], from: 1, cut: 0 }]];
    let mut calls = 0;
    let stop = packed::<RuntimeError>(&model, &one(50), Packing::default(), &mut |_, _| {
        calls += 1;
        Err(RuntimeError::Input { what: "test", problem: "enough".into() })
    });
    assert!(stop.unwrap_err().to_string().contains("enough") && calls == 1);
    // 256 positions: 257 tokens of which the last is not fed, and no more.
    run_packed(&model, &one(257), Packing::default());
    let e = packed::<RuntimeError>(&model, &one(258), Packing::default(), &mut |_, _| Ok(())).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("256"), "{e}");
    let bad = vec![vec![Continuation { tokens: vec![1, 999, 1], from: 1, cut: 0 }]];
    assert!(packed::<RuntimeError>(&model, &bad, Packing::default(), &mut |_, _| Ok(())).is_err());
}

/// The answers of a file, as `dsq eval --tasks` has them.
fn answers(name: &str) -> (TaskFile, Vec<Vec<Continuation>>, Vec<Vec<Answer>>) {
    let checkpoint = Checkpoint::open(&golden("tasks/model")).unwrap();
    let ModelConfig::Llama(config) = checkpoint.config() else { panic!("a language model") };
    let tokenizer = TextTokenizer::new(&checkpoint).unwrap();
    let encoder = Continuations::new(&tokenizer, config.bos_token_id, config.max_position_embeddings).unwrap();
    let file = TaskFile::read(&golden(&format!("tasks/{name}.jsonl")), None).unwrap();
    let of = |c: &dsq_eval::Request| encoder.encode(&c.context, &c.continuation).unwrap();
    let groups: Vec<Vec<_>> = file.items.iter().map(|i| i.choices.iter().map(of).collect()).collect();
    let mut scored: Vec<Vec<Answer>> = groups.iter().map(|g| vec![Answer::default(); g.len()]).collect();
    let model = LlamaRuntime::load(&checkpoint, 2).unwrap();
    packed::<RuntimeError>(&model, &groups, Packing::default(), &mut |rows, logits| {
        let targets: Vec<u32> = rows.iter().map(|r| groups[r.group][r.member].tokens[r.position]).collect();
        for (row, score) in rows.iter().zip(token_scores(logits, &targets, "model").unwrap()) {
            scored[row.group][row.member].push(score);
        }
        Ok(())
    })
    .unwrap();
    (file, groups, scored)
}

/// In f32 with unit roundoff u, a sum of k products is off by at most k u times the sum of the magnitudes. The model has k <= 64 and
/// passes 17 such sums in a row (two layers of eight and the head), so that logits are off by at most 17 * 64 u of the magnitudes that
/// make them, about the largest logit, and a log probability by twice that. (torch's own f32 pass is off by a thousandth of this.)
#[test]
fn log_likelihoods_are_those_of_transformers() {
    let want: Value = serde_json::from_slice(&std::fs::read(golden("tasks/golden.json")).unwrap()).unwrap();
    let bound = 2.0 * 17.0 * 64.0 * 2f64.powi(-24) * want["largest_logit"].as_f64().unwrap();
    let mut worst = 0.0f64;
    for name in ["predict", "choice", "partial"] {
        let (file, groups, scored) = answers(name);
        let flat = file
            .items
            .iter()
            .zip(&groups)
            .zip(&scored)
            .flat_map(|((i, g), s)| g.iter().zip(s).enumerate().map(move |(idx, (c, a))| (i.id, idx, c, a)));
        let want = want[name].as_array().unwrap();
        assert_eq!(file.requests(), want.len(), "{name}");
        for ((id, idx, c, got), want) in flat.zip(want) {
            assert_eq!((Some(id), Some(idx as u64)), (want["doc_id"].as_i64(), want["idx"].as_u64()), "{name}");
            let tokens = (got.tokens as u64, c.cut as u64, got.greedy);
            let wanted = (want["tokens"].as_u64().unwrap(), want["cut"].as_u64().unwrap(), want["greedy"] == true);
            assert_eq!(tokens, wanted, "{name}: {id} {idx}");
            let off = (got.log_likelihood - want["log_likelihood"].as_f64().unwrap()).abs() / got.tokens as f64;
            worst = worst.max(off);
            assert!(off <= bound, "{name}: doc_id {id}, idx {idx}: off by {off:e} a token, expected at most {bound:e}");
        }
    }
    println!("worst {worst:e} a token, bound {bound:e}");
}

#[test]
fn metrics_of_the_golden_files() {
    let of = |name: &str| {
        let (file, _, scored) = answers(name);
        task_metrics(&file.items, &scored, Some(&scored)).unwrap()
    };
    let value = |e: Option<dsq_eval::Estimate>| e.map(|e| e.value);
    // From golden.json: chosen 2, 0, 0, 0 where 1, 0, 1, 0 are right; by byte the same, by token 2, 0, 3, 1.
    let m = of("choice");
    assert_eq!([m.accuracy, m.accuracy_per_byte, m.accuracy_per_token].map(value), [0.5, 0.5, 0.25].map(Some));
    assert_eq!((m.items, m.requests, value(m.agreement)), (4, 12, Some(1.0)));
    assert!(m.differences.iter().all(|(_, d)| (d.value, d.low, d.high) == (0.0, 0.0, 0.0)));
    // Ben is the likelier one, the trophy too.
    let m = of("partial");
    assert_eq!((value(m.accuracy), m.greedy.value), (Some(0.5), 0.5));
    let m = of("predict");
    assert_eq!((value(m.accuracy), m.greedy.value, m.items), (None, 2.0 / 6.0, 6));
}
