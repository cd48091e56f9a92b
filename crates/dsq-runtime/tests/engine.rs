//! The engine against single runs: whatever comes, goes and waits beside it, a request gets the tokens that it gets alone. Not
//! the text functions themselves (see `stop.rs`, `sampler.rs`), not the forward pass (see `llama.rs`).

use dsq_checkpoint::Checkpoint;
use dsq_runtime::{
    Engine, EngineSettings, FinishReason, KvPolicy, KvType, LlamaRuntime, Output, Request, RequestId, Sampler,
    Sampling, StopStrings, TextTokenizer, generate,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn load(name: &str, threads: usize) -> LlamaRuntime {
    LlamaRuntime::load(&Checkpoint::open(&golden(name)).unwrap(), threads).unwrap()
}

/// An engine with memory for `blocks` blocks of 16 positions, for sequences of at most `longest` tokens.
fn engine<'m>(model: &'m LlamaRuntime, blocks: usize, longest: usize, settings: EngineSettings) -> Engine<'m> {
    let pool = model.new_pool(blocks * 16, longest, KvType::F32, KvPolicy::Full).unwrap();
    Engine::new(model, None, pool, settings).unwrap()
}

/// What a request gets alone, in a context of `longest` positions.
fn alone(model: &LlamaRuntime, r: &Request, longest: usize) -> (Vec<u32>, FinishReason) {
    let mut cache = model.new_cache(longest).unwrap();
    let mut sampler = Sampler::new(r.sampling).unwrap();
    let mut ended = false;
    let vocab = model.config().vocab_size;
    let mut made = generate(model, &mut cache, &r.prompt, r.max_tokens, vocab, &mut sampler, &mut |id| {
        ended = r.ends.contains(&id);
        if ended { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    if ended {
        made.tokens.pop();
        made.finish = FinishReason::Stop;
    }
    (made.tokens, made.finish)
}

/// The tokens and the end of each request, as the outputs tell them.
#[derive(Default)]
struct Told {
    tokens: HashMap<RequestId, Vec<u32>>,
    text: HashMap<RequestId, String>,
    reasons: HashMap<RequestId, FinishReason>,
    preemptions: usize,
    shared: usize,
}

impl Told {
    fn take(&mut self, outputs: &mut Vec<Output>) {
        for o in outputs.drain(..) {
            assert!(!self.reasons.contains_key(&o.id), "nothing comes after the end");
            self.tokens.entry(o.id).or_default().extend(o.token);
            self.text.entry(o.id).or_default().push_str(&o.text);
            if let Some(end) = o.finished {
                assert_eq!(end.stats.tokens, self.tokens[&o.id].len());
                assert!(
                    end.stats.queued <= end.stats.total && end.stats.first_token.is_some_and(|t| t <= end.stats.total)
                );
                self.preemptions += end.stats.preemptions;
                self.shared += end.stats.shared_tokens;
                self.reasons.insert(o.id, end.reason.unwrap());
            }
        }
    }

    fn run(engine: &mut Engine) -> Self {
        let (mut told, mut outputs) = (Self::default(), Vec::new());
        while !engine.is_idle() {
            engine.step(&mut outputs);
            told.take(&mut outputs);
        }
        told
    }
}

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { prompt, max_tokens, ..Default::default() }
}

#[test]
fn c064_prompts_of_several_lengths_in_one_batch_in_any_order() {
    for name in ["llama_tiny", "qwen3_tiny", "mistral_tiny", "mixtral_tiny", "deepseek_v3_tiny"] {
        let model = load(name, 2);
        let vocab = model.config().vocab_size as u32;
        let prompts = [3u32, 7, 16].map(|n| (0..n).map(|i| (i * 31 + n) % vocab).collect::<Vec<_>>());
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut e = engine(&model, 30, 64, EngineSettings::default());
            let ends = model.config().eos_token_ids.clone();
            let request = |i: usize| Request { ends: ends.clone(), ..greedy(prompts[i].clone(), 20) };
            let ids = order.map(|i| e.submit(request(i)).unwrap());
            let told = Told::run(&mut e);
            for (i, id) in order.into_iter().zip(ids) {
                let want = alone(&model, &request(i), 64);
                assert_eq!((&told.tokens[&id], told.reasons[&id]), (&want.0, want.1), "{name}");
            }
        }
    }
}

#[test]
fn c067_a_request_does_not_know_what_ran_before() {
    let model = load("llama_tiny", 1);
    let long: Vec<u32> = (0..62).map(|i| i * 7 % 128).collect();
    let mut e = engine(&model, 8, 100, EngineSettings::default());
    let mut run = |prompt: &[u32]| {
        let id = e.submit(greedy(prompt.to_vec(), 10)).unwrap();
        let mut told = Told::run(&mut e);
        (told.tokens.remove(&id).unwrap(), told.shared)
    };
    let first = run(&long);
    let other = run(&long[..5]);
    let again = run(&long);
    assert_eq!((first.1, other.1, again.1), (0, 0, 48), "three full blocks are there; the last token is computed");
    assert_eq!(first.0, again.0);
    assert_eq!(other.0, alone(&model, &greedy(long[..5].to_vec(), 10), 100).0);
    // Prompts that are a whole number of blocks, and one that goes on as an answer did.
    assert_eq!((run(&long[..48]).1, run(&[&long[..], &first.0[..]].concat()).1), (32, 64));
}

/// Requests of all kinds come and go at random, in memory that is far too small for all of them.
#[test]
fn random_admissions_and_cancellations_change_no_token() {
    let (mut preemptions, mut shared, mut cancelled, mut lengths) = (0, 0, 0, 0);
    for (round, name) in
        ["llama_tiny", "llama_tiny_untied", "qwen2_tiny", "mixtral_tiny"].into_iter().cycle().take(24).enumerate()
    {
        let mut rng = ChaCha8Rng::seed_from_u64(round as u64);
        let model = load(name, 1 + round % 3);
        let vocab = model.config().vocab_size as u32;
        let longest = rng.random_range(40..90);
        let blocks = rng.random_range(4..14usize);
        let capacity = longest.min(blocks * 16);
        let settings = EngineSettings {
            sequences: rng.random_range(1..8),
            step_tokens: rng.random_range(1..40),
            share_prefixes: round % 4 != 3,
        };
        let mut e = engine(&model, blocks, longest, settings);
        let (mut told, mut outputs) = (Told::default(), Vec::new());
        let mut asked: Vec<(RequestId, Request)> = Vec::new();
        let mut gone: Vec<RequestId> = Vec::new();
        while asked.len() < 18 || !e.is_idle() {
            if asked.len() < 18 && rng.random_bool(0.4) {
                // Often the beginning of another request, sometimes all of it.
                let mut prompt: Vec<u32> = match asked.last() {
                    Some((_, r)) if rng.random_bool(0.6) => r.prompt[..rng.random_range(1..=r.prompt.len())].to_vec(),
                    _ => Vec::new(),
                };
                let more = rng.random_range(usize::from(prompt.is_empty())..25);
                prompt.extend((0..more).map(|_| rng.random_range(0..vocab)));
                prompt.truncate(capacity);
                let sampling = match rng.random_range(0..3) {
                    0 => Sampling::default(),
                    1 => Sampling { temperature: 1.5, top_k: 20, top_p: 0.9, seed: rng.random(), ..Default::default() },
                    _ => Sampling {
                        temperature: 2.0,
                        min_p: 0.01,
                        repetition_penalty: 1.3,
                        seed: rng.random(),
                        ..Default::default()
                    },
                };
                let ends = (0..rng.random_range(0..4)).map(|_| rng.random_range(0..vocab)).collect();
                let ends = [ends, model.config().eos_token_ids.clone()].concat();
                let request =
                    Request { prompt, max_tokens: rng.random_range(1..50), sampling, ends, ..Default::default() };
                asked.push((e.submit(request.clone()).unwrap(), request));
            }
            if rng.random_bool(0.06) && !asked.is_empty() {
                let id = asked[rng.random_range(0..asked.len())].0;
                match e.cancel(id) {
                    Some(end) => {
                        assert_eq!(end.reason.unwrap(), FinishReason::Cancelled);
                        assert_eq!(end.stats.tokens, told.tokens.get(&id).map_or(0, Vec::len));
                        gone.push(id);
                    }
                    None => assert!(told.reasons.contains_key(&id) || gone.contains(&id), "it has ended"),
                }
            }
            assert!(e.running() <= settings.sequences);
            e.step(&mut outputs);
            assert!(outputs.iter().all(|o| !gone.contains(&o.id)), "nothing comes of a cancelled request");
            told.take(&mut outputs);
        }
        assert_eq!(e.blocks_in_use(), 0, "every block is free or held for reuse");
        if !settings.share_prefixes {
            assert_eq!(e.pool().free_blocks(), blocks);
        }
        for (id, request) in &asked {
            let (want, reason) = alone(&model, request, capacity);
            let empty = Vec::new();
            let got = told.tokens.get(id).unwrap_or(&empty);
            if gone.contains(id) {
                assert!(want.starts_with(got), "{name} {round}");
            } else {
                assert_eq!((got, told.reasons[id]), (&want, reason), "{name} {round}: {request:?}");
                lengths += usize::from(got.len() < request.max_tokens && reason == FinishReason::Length);
            }
        }
        preemptions += told.preemptions;
        shared += told.shared;
        cancelled += gone.len();
    }
    // The rounds are such that all of this happens.
    assert!(
        preemptions > 20 && shared > 200 && cancelled > 20 && lengths > 5,
        "{preemptions} {shared} {cancelled} {lengths}"
    );
}

#[test]
fn c062_requests_that_can_never_run_are_refused_by_number() {
    let model = load("llama_tiny", 1);
    let mut e = engine(&model, 4, 100, EngineSettings::default());
    let text = |r: Request, e: &mut Engine| {
        let error = e.submit(r).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    assert_eq!(
        text(greedy(vec![1; 65], 1), &mut e),
        "prompt: expected at most 64 tokens (positions of the KV cache), got 65"
    );
    assert!(text(greedy(vec![], 1), &mut e).contains("got none"));
    assert!(text(greedy(vec![5, 128], 1), &mut e).contains("128"));
    assert!(text(greedy(vec![5], 0), &mut e).contains("max_tokens"));
    let sampling = Sampling { min_p: 2.0, ..Default::default() };
    assert!(text(Request { sampling, ..greedy(vec![5], 1) }, &mut e).contains("min_p"));
    let stops = StopStrings::new(vec!["x".into()]).unwrap();
    assert!(text(Request { stops, ..greedy(vec![5], 1) }, &mut e).contains("tokenizer"));
    assert!(e.is_idle());
    assert!(
        text(greedy(vec![1; 61], 1), &mut engine(&model, 9, 60, EngineSettings::default()))
            .contains("positions of the context")
    );
    // 63 positions and the one of the last token that is fed back.
    for (prompt, made) in [(64, 1), (63, 2)] {
        let id = e.submit(greedy(vec![1; prompt], 10)).unwrap();
        let told = Told::run(&mut e);
        assert_eq!((told.tokens[&id].len(), told.reasons[&id]), (made, FinishReason::Length));
    }
    let pool = model.new_pool(15, 100, KvType::F32, KvPolicy::Full).unwrap();
    assert!(Engine::new(&model, None, pool, EngineSettings::default()).unwrap_err().to_string().contains("KV cache"));
}

/// A waiting request does not pass one before it, and what ran longest keeps its memory.
#[test]
fn requests_run_in_order_and_wait_for_memory() {
    let model = load("llama_tiny", 1);
    let mut e = engine(&model, 4, 64, EngineSettings { share_prefixes: false, ..Default::default() });
    let first = e.submit(greedy(vec![1; 40], 20)).unwrap();
    let second = e.submit(greedy(vec![2; 20], 20)).unwrap();
    let third = e.submit(greedy(vec![3; 2], 2)).unwrap();
    let mut out = Vec::new();
    e.step(&mut out);
    assert_eq!((e.running(), e.waiting(), e.blocks_in_use()), (1, 2, 3), "the third fits, and waits behind the second");
    assert!(e.cancel(second).is_some() && e.cancel(second).is_none());
    e.step(&mut out);
    assert_eq!((e.running(), e.waiting(), e.blocks_in_use()), (2, 0, 4));
    assert!(e.cancel(first).is_some());
    assert_eq!(e.blocks_in_use(), 1);
    e.step(&mut out);
    assert_eq!(e.pool().free_blocks(), 4);
    assert_eq!(out.iter().filter(|o| o.id == third).count(), 2);
}

/// The broken row of one request's token reaches nobody else, whether the cache can hold it (f32) or refuses it (f16).
#[test]
fn a_request_whose_numbers_break_ends_alone() {
    let from = golden("llama_tiny_untied");
    let sound = load("llama_tiny_untied", 2);
    let run = |model: &LlamaRuntime, kv: KvType, prompts: [Vec<u32>; 3]| {
        let pool = model.new_pool(160, 64, kv, KvPolicy::Full).unwrap();
        let mut e = Engine::new(model, None, pool, EngineSettings::default()).unwrap();
        let ids = prompts.map(|p| e.submit(greedy(p, 6)).unwrap());
        let mut out = Vec::new();
        while !e.is_idle() {
            e.step(&mut out);
        }
        assert_eq!(e.blocks_in_use(), 0, "{kv:?}");
        ids.map(|id| {
            let mine = || out.iter().filter(|o| o.id == id);
            let ends: Vec<_> = mine().filter_map(|o| o.finished.as_ref()).collect();
            assert_eq!(ends.len(), 1);
            let code = ends[0].reason.as_ref().map_err(dsq_runtime::RuntimeError::exit_code).copied();
            (mine().filter_map(|o| o.token).collect::<Vec<_>>(), code)
        })
    };
    for kv in [KvType::F32, KvType::F16, KvType::Int8, KvType::Fp8] {
        let prompts = |bad: u32| [vec![1, 2, 3], vec![4, bad, 5], vec![6; 20]];
        let want = run(&sound, kv, prompts(9));
        let seen: Vec<u32> = want.iter().flat_map(|(tokens, _)| tokens.clone()).chain(1..10).collect();
        let bad = (0..128).find(|id| !seen.contains(id)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
        let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let tensor = &header["model.embed_tokens.weight"];
        assert_eq!(tensor["dtype"], "F32");
        let [width, start] = [&tensor["shape"][1], &tensor["data_offsets"][0]].map(|v| v.as_u64().unwrap() as usize);
        let row = 8 + n + start + bad as usize * width * 4;
        bytes[row..row + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let model = LlamaRuntime::load(&Checkpoint::open(dir.path()).unwrap(), 2).unwrap();
        let got = run(&model, kv, prompts(bad));
        assert_eq!(got[1], (vec![], Err(6)), "{kv:?}");
        assert_eq!((&got[0], &got[2]), (&want[0], &want[2]), "{kv:?}");
        assert_eq!(got[0].1, Ok(FinishReason::Length));
    }
}

#[test]
fn stop_strings_and_unknown_rows_end_and_bound_an_answer() {
    // Six tokens of 128 rows, each a letter: every answer is a text of them.
    let json = r#"{"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": {"type": "BPE",
        "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "?": 5}, "merges": [], "unk_token": "?"}}"#;
    let tokenizer = TextTokenizer::from_json(json.as_bytes(), "tokenizer.json").unwrap();
    let model = load("llama_tiny", 1);
    let run = |stops: &[&str], seed: u64| {
        let pool = model.new_pool(320, 100, KvType::F32, KvPolicy::Full).unwrap();
        let mut e = Engine::new(&model, Some(&tokenizer), pool, EngineSettings::default()).unwrap();
        let sampling = Sampling { temperature: 50.0, seed, ..Default::default() };
        let stops = StopStrings::new(stops.iter().map(|s| (*s).to_string()).collect()).unwrap();
        let id = e.submit(Request { sampling, stops, ..greedy(vec![1, 2], 60) }).unwrap();
        let mut told = Told::run(&mut e);
        (told.text.remove(&id).unwrap(), told.reasons[&id], told.tokens.remove(&id).unwrap())
    };
    let mut stopped = 0;
    for seed in 0..12 {
        let (whole, reason, tokens) = run(&[], seed);
        assert!(tokens.iter().all(|&id| id < 6) && reason == FinishReason::Length);
        assert_eq!(whole.len(), 60);
        let (text, reason, tokens) = run(&["cab", "ee", "d?"], seed);
        let end = ["cab", "ee", "d?"].iter().filter_map(|s| whole.find(s).map(|at| (at + s.len(), at))).min();
        assert_eq!(text, whole[..end.map_or(60, |(_, at)| at)]);
        assert_eq!(tokens.len(), end.map_or(60, |(to, _)| to), "no token after the stop string");
        assert_eq!(reason, if end.is_some() { FinishReason::Stop } else { FinishReason::Length });
        stopped += usize::from(end.is_some());
    }
    assert!(stopped > 3);
}

/// After the first requests nothing of the engine's memory grows.
#[test]
fn memory_stays_as_it_is_after_the_first_requests() {
    let model = load("llama_tiny", 1);
    let mut e = engine(&model, 12, 64, EngineSettings { sequences: 4, ..Default::default() });
    let mut bytes = Vec::new();
    for round in 0..6u32 {
        for i in 0..6u32 {
            e.submit(greedy((0..30).map(|t| (t * (i + 3) + round) % 128).collect(), 20)).unwrap();
        }
        Told::run(&mut e);
        bytes.push(e.pool().bytes());
    }
    assert!(bytes[1..].iter().all(|b| *b == bytes[1]), "{bytes:?}");
}
