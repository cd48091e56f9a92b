//! KV policies: what stays, what is given back, and that a policy's tokens depend on the text alone: not on pieces, batch mates,
//! threads or memory. Not the masses of attention (see `dsq-kernels`).

use dsq_checkpoint::Checkpoint;
use dsq_runtime::{
    Engine, EngineSettings, Entry, FinishReason, KvPolicy, KvPool, KvType, LlamaRuntime, Logits, Output, Request,
    RequestId, Sampler, Sampling, generate,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

const FULL: KvPolicy = KvPolicy::Full;
const BLOCK: usize = KvPool::block_len();

fn load(name: &str, threads: usize) -> LlamaRuntime {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    LlamaRuntime::load(&Checkpoint::open(&path).unwrap(), threads).unwrap()
}

fn window(sinks: usize, window: usize) -> KvPolicy {
    KvPolicy::Window { sinks, window }
}

fn entropy(budget: usize, sinks: usize, recent: usize) -> KvPolicy {
    KvPolicy::Entropy { budget, sinks, recent }
}

/// A text without a period.
fn text(len: usize, vocab: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 31 + i * 7 + 3) % vocab) as u32).collect()
}

/// Logits of every token in one step, in a pool that has room for all of them.
fn at_once(model: &LlamaRuntime, tokens: &[u32], policy: KvPolicy) -> Vec<f32> {
    at_once_of(model, tokens, policy, KvType::F32)
}

fn at_once_of(model: &LlamaRuntime, tokens: &[u32], policy: KvPolicy, kv: KvType) -> Vec<f32> {
    let mut pool = model.new_pool(tokens.len() + BLOCK, tokens.len(), kv, policy).unwrap();
    let (mut sequence, mut out) = (pool.new_sequence(), Vec::new());
    model.step(&mut pool, &mut [Entry { sequence: &mut sequence, tokens, logits: Logits::All }], &mut out).unwrap();
    out
}

/// Logits of every token in pieces of these lengths, again and again, in exactly the memory that the policy says it needs.
fn in_pieces(model: &LlamaRuntime, tokens: &[u32], policy: KvPolicy, kv: KvType, pieces: &[usize]) -> Vec<f32> {
    let blocks = policy.blocks(tokens.len(), *pieces.iter().max().unwrap());
    let mut pool = model.new_pool(blocks * BLOCK, tokens.len(), kv, policy).unwrap();
    let (mut sequence, mut out, mut made) = (pool.new_sequence(), Vec::new(), Vec::new());
    let mut left = tokens;
    for piece in pieces.iter().cycle() {
        let (tokens, rest) = left.split_at((*piece).min(left.len()));
        let mut batch = [Entry { sequence: &mut sequence, tokens, logits: Logits::All }];
        model.step(&mut pool, &mut batch, &mut made).unwrap();
        out.extend_from_slice(&made);
        left = rest;
        if left.is_empty() {
            break;
        }
    }
    pool.release(sequence);
    assert_eq!(pool.free_blocks(), blocks);
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_window_that_holds_everything_gives_the_bits_of_full() {
    for name in ["llama_tiny", "qwen3_tiny", "mistral_tiny", "mixtral_tiny", "deepseek_v3_tiny"] {
        let model = load(name, 2);
        let tokens = text(200, model.config().vocab_size);
        let full = bits(&at_once(&model, &tokens, FULL));
        assert_eq!(bits(&at_once(&model, &tokens, window(0, 200))), full, "{name}");
        assert_eq!(bits(&at_once(&model, &tokens, window(4, 196))), full, "{name}: sinks and window meet");
        assert_ne!(bits(&at_once(&model, &tokens, window(4, 5))), full, "{name}");
        assert_eq!(bits(&in_pieces(&model, &tokens, window(190, 10), KvType::F32, &[64, 1])), full, "{name}");
    }
}

/// Given back or only hidden: the same bits, in the memory of the bound, for every cut and format.
#[test]
fn a_window_gives_the_bits_of_its_mask() {
    for name in ["llama_tiny", "mistral_tiny", "deepseek_v3_tiny"] {
        let model = load(name, 2);
        let tokens = text(200, model.config().vocab_size);
        for policy in [window(0, 1), window(4, 30), window(17, 16), window(32, 5), window(100, 40)] {
            let masked = bits(&at_once(&model, &tokens, policy));
            for pieces in [&[1][..], &[16], &[7, 30, 1]] {
                let got = in_pieces(&model, &tokens, policy, KvType::F32, pieces);
                assert_eq!(bits(&got), masked, "{name} {policy:?} {pieces:?}");
            }
            let mut cache = model.new_cache_of(200, KvType::F16, policy).unwrap();
            let whole = model.forward(&tokens, &mut cache, Logits::All).unwrap();
            assert_eq!(bits(&in_pieces(&model, &tokens, policy, KvType::F16, &[1])), bits(&whole));
            cache.truncate(0).unwrap();
            let last = model.forward(&tokens, &mut cache, Logits::Last).unwrap();
            assert_eq!(bits(&last), bits(&whole[199 * model.config().vocab_size..]));
        }
    }
}

#[test]
fn a_part_of_the_logits_is_the_same_part_where_a_prompt_goes_through_in_pieces() {
    let model = load("llama_tiny", 1);
    let (tokens, vocab) = (text(220, 128), 128);
    for policy in [FULL, window(4, 40), entropy(48, 4, 16)] {
        let run = |logits| {
            let mut cache = model.new_cache_of(tokens.len(), KvType::F32, policy).unwrap();
            model.forward(&tokens, &mut cache, logits).unwrap()
        };
        let all = run(Logits::All);
        for (from, to) in [(150, 215), (0, 10), (192, 193), (200, 220), (7, 7)] {
            let part = run(Logits::Part { from, to });
            assert_eq!(bits(&part), bits(&all[from * vocab..to * vocab]), "{policy:?} {from}..{to}");
        }
    }
}

#[test]
fn blocks_out_of_sight_return_to_the_pool() {
    // Window 8 of mistral's own: no sinks, and the shorter one holds.
    for (name, sinks, seen) in [("llama_tiny", 20, 40), ("mistral_tiny", 0, 8)] {
        let model = load(name, 1);
        let policy = window(20, 40);
        let mut pool = model.new_pool(20 * BLOCK, 256, KvType::F32, policy).unwrap();
        let (mut sequence, mut out) = (pool.new_sequence(), Vec::new());
        for len in 1..=250usize {
            let mut batch = [Entry { sequence: &mut sequence, tokens: &[3], logits: Logits::None }];
            model.step(&mut pool, &mut batch, &mut out).unwrap();
            // Blocks of which the token at `len` sees a position.
            let sees = |p: usize| p < len && (p < sinks || p + seen > len);
            let there: Vec<bool> = (0..len.div_ceil(BLOCK)).map(|b| (b * BLOCK..(b + 1) * BLOCK).any(sees)).collect();
            let last = there.len() - 1;
            for (b, (&block, &there)) in sequence.blocks().iter().zip(&there).enumerate() {
                // The block that is being filled stays.
                assert_eq!(block != u32::MAX, there || (b == last && len % BLOCK != 0), "{name}: block {b} at {len}");
            }
            let held = sequence.blocks().iter().filter(|b| **b != u32::MAX).count();
            assert_eq!(pool.free_blocks(), 20 - held);
            assert!(held <= policy.blocks(len, 1));
        }
        pool.release(sequence);
        assert_eq!(pool.free_blocks(), 20);
    }
}

#[test]
fn what_a_window_gave_back_is_neither_cut_to_nor_shared() {
    let model = load("llama_tiny", 1);
    let tokens = text(200, 128);
    let policy = window(4, 40);
    let mut pool = model.new_pool(300, 200, KvType::F32, policy).unwrap();
    let (mut sequence, mut out) = (pool.new_sequence(), Vec::new());
    let run = |pool: &mut KvPool, sequence: &mut dsq_runtime::Sequence, tokens: &[u32], out: &mut Vec<f32>| {
        model.step(pool, &mut [Entry { sequence, tokens, logits: Logits::All }], out).unwrap();
    };
    run(&mut pool, &mut sequence, &tokens, &mut out);
    let all = out.clone();
    // The token at 190 sees from 151 on, which is in block 9; lost are blocks 1 to 9 (positions 16 to 159 at length 200).
    let e = pool.truncate(&mut sequence, 190).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("from 200 to 190") && e.to_string().contains("window"), "{e}");
    assert_eq!(sequence.len(), 200);
    assert!(pool.fork(&sequence, 190).is_none());
    // The token at 199 sees from 160 on, which is there.
    let mut other = pool.fork(&sequence, 199).unwrap();
    run(&mut pool, &mut other, &tokens[199..], &mut out);
    assert_eq!(bits(&out), bits(&all[199 * 128..]));
    pool.release(other);
    pool.truncate(&mut sequence, 199).unwrap();
    run(&mut pool, &mut sequence, &tokens[199..], &mut out);
    assert_eq!(bits(&out), bits(&all[199 * 128..]));
    // What is left of the sinks alone is all there is.
    pool.truncate(&mut sequence, 10).unwrap();
    run(&mut pool, &mut sequence, &tokens[10..], &mut out);
    assert_eq!(bits(&out), bits(&all[10 * 128..]));
    pool.truncate(&mut sequence, 0).unwrap();
    assert_eq!(pool.free_blocks(), pool.blocks());
    let e = model.new_pool(300, 200, KvType::F32, window(4, 0)).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("got 0"), "{e}");
}

#[test]
fn a_budget_that_holds_everything_gives_the_bits_of_full() {
    for name in ["llama_tiny", "qwen3_tiny", "mixtral_tiny", "deepseek_v3_tiny"] {
        let model = load(name, 2);
        let vocab = model.config().vocab_size;
        let tokens = text(250, vocab);
        let full = at_once(&model, &tokens, FULL);
        assert_eq!(
            bits(&at_once(&model, &tokens, entropy(192, 4, 32))),
            bits(&full),
            "{name}: 192 at the last pruning"
        );
        let got = at_once(&model, &tokens, entropy(40, 4, 16));
        // The first pruning is behind position 63.
        assert_eq!(bits(&got[..64 * vocab]), bits(&full[..64 * vocab]), "{name}");
        assert_ne!(bits(&got[64 * vocab..65 * vocab]), bits(&full[64 * vocab..65 * vocab]), "{name}");
    }
}

/// Pieces, batch mates, threads and the exact memory of the bound: the same bits.
#[test]
fn a_pruned_sequence_depends_on_its_text_alone() {
    for name in ["llama_tiny", "qwen3_tiny", "deepseek_v3_tiny"] {
        let [model, threads] = [1, 3].map(|n| load(name, n));
        let vocab = model.config().vocab_size;
        let tokens = text(250, vocab);
        for policy in [entropy(40, 4, 16), entropy(16, 0, 1), entropy(70, 20, 50)] {
            for kv in [KvType::F32, KvType::F16, KvType::Int8, KvType::Fp8] {
                let once = bits(&in_pieces(&model, &tokens, policy, kv, &[250]));
                for pieces in [&[1][..], &[64], &[7, 30, 1], &[129, 3]] {
                    let got = bits(&in_pieces(&threads, &tokens, policy, kv, pieces));
                    assert_eq!(got, once, "{name} {policy:?} {kv:?} {pieces:?}");
                }
                let mut cache = model.new_cache_of(250, kv, policy).unwrap();
                assert_eq!(bits(&model.forward(&tokens, &mut cache, Logits::All).unwrap()), once);
                cache.truncate(0).unwrap();
                assert_eq!(bits(&model.forward(&tokens, &mut cache, Logits::All).unwrap()), once);
            }
            // Beside others, which are pruned at other steps.
            let mut pool = model.new_pool(60 * BLOCK, 256, KvType::F32, policy).unwrap();
            let texts = [tokens.clone(), text(199, vocab)[13..].to_vec(), text(110, vocab)];
            let mut sequences = [0; 3].map(|_| pool.new_sequence());
            let (mut made, mut got) = (Vec::new(), [const { Vec::new() }; 3]);
            let mut left: [&[u32]; 3] = texts.each_ref().map(|t| &t[..]);
            for step in 0.. {
                let mut pieces = Vec::new();
                for (i, left) in left.iter_mut().enumerate() {
                    let (piece, rest) = left.split_at((1 + (step * 37 + i * 50) % 90).min(left.len()));
                    pieces.push(piece);
                    *left = rest;
                }
                if pieces.iter().all(|p| p.is_empty()) {
                    break;
                }
                let entries = sequences.iter_mut().zip(&pieces).filter(|(_, p)| !p.is_empty());
                let mut batch: Vec<Entry> =
                    entries.map(|(sequence, tokens)| Entry { sequence, tokens, logits: Logits::All }).collect();
                model.step(&mut pool, &mut batch, &mut made).unwrap();
                let mut rest = &made[..];
                for (piece, got) in pieces.iter().zip(&mut got) {
                    let (rows, more) = rest.split_at(piece.len() * vocab);
                    got.extend_from_slice(rows);
                    rest = more;
                }
                for s in &sequences {
                    let KvPolicy::Entropy { budget, .. } = policy else { continue };
                    assert!(s.blocks().len() <= (budget + budget / 4 + s.len() % 64).div_ceil(BLOCK) || s.len() < 64);
                }
            }
            for (got, text) in got.iter().zip(&texts) {
                assert_eq!(bits(got), bits(&at_once(&model, text, policy)), "{name} {policy:?}");
            }
            sequences.into_iter().for_each(|s| pool.release(s));
            assert_eq!(pool.free_blocks(), 60);
        }
    }
}

#[test]
fn what_a_pruned_sequence_cannot_do_is_refused() {
    let model = load("llama_tiny", 1);
    let policy = entropy(40, 4, 16);
    let mut pool = model.new_pool(300, 200, KvType::F32, policy).unwrap();
    let (mut sequence, mut out) = (pool.new_sequence(), Vec::new());
    let tokens = text(150, 128);
    let mut batch = [Entry { sequence: &mut sequence, tokens: &tokens, logits: Logits::Last }];
    model.step(&mut pool, &mut batch, &mut out).unwrap();
    let e = pool.truncate(&mut sequence, 149).unwrap_err();
    assert!(
        e.exit_code() == 2 && e.to_string().contains("from 150 to 149") && e.to_string().contains("entropy"),
        "{e}"
    );
    pool.truncate(&mut sequence, 150).unwrap();
    assert!(pool.fork(&sequence, 150).is_none() && pool.fork(&sequence, 64).is_none());
    let blocks = sequence.blocks().to_vec();
    assert_eq!(pool.share(&blocks).len(), 0);
    pool.truncate(&mut sequence, 0).unwrap();
    assert_eq!(pool.free_blocks(), pool.blocks());
    let e = Engine::new(&model, None, pool, EngineSettings::default()).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().starts_with("share_prefixes: expected false"), "{e}");
    for (policy, words) in [
        (entropy(19, 4, 16), "at least the 4 sinks and 16 recent positions, got 19"),
        (entropy(19, 4, 0), "KV recent: expected at least 1 position, got 0"),
        (entropy(5, usize::MAX, 1), "got 5"),
    ] {
        let e = model.new_pool(300, 200, KvType::F32, policy).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains(words), "{e}");
    }
    let e = load("mistral_tiny", 1).new_cache_of(64, KvType::F32, policy).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("a window of 8 in layer 0"), "{e}");
    // A budget without bound is that of full.
    assert_eq!(entropy(usize::MAX, 4, 16).blocks(200, 1), 13);
}

#[test]
fn a_report_counts_hits_positions_and_bytes() {
    for name in ["llama_tiny", "deepseek_v3_tiny"] {
        let model = load(name, 2);
        let tokens = text(210, model.config().vocab_size);
        let policies = [FULL, window(4, 40), entropy(40, 4, 16), window(0, 400), entropy(250, 4, 16), window(0, 1)];
        let runs = model.run_policies(&tokens, KvType::F32, &policies).unwrap();
        for (run, &policy) in runs.iter().zip(&policies) {
            assert_eq!(bits(&run.logits), bits(&at_once(&model, &tokens, policy)), "{name} {policy:?}");
            let c = model.config();
            let weight = (c.num_hidden_layers * c.num_attention_heads * 210) as f64;
            assert!((run.weight / weight - 1.0).abs() < 1e-5, "{} {weight}", run.weight);
            assert!(run.bytes <= run.allocated);
        }
        let rate = |i: usize| runs[i].hits / runs[i].weight;
        for all in [0, 3, 4] {
            assert!((rate(all) - 1.0).abs() < 1e-9, "{}", rate(all));
            assert_eq!((runs[all].positions, runs[all].bytes), (210.0, runs[0].allocated));
        }
        for some in [1, 2, 5] {
            assert!(rate(some) > 0.0 && rate(some) < 0.95, "{name} {}", rate(some));
        }
        assert!(rate(1) > rate(5));
        // 4 sinks and the 39 before the next token, from position 171 on: of 14 blocks of 16 positions the first and the last four.
        assert_eq!((runs[1].positions, 14 * runs[1].bytes), (43.0, 5 * runs[0].bytes));
        assert_eq!((runs[5].positions, 14 * runs[5].bytes), (0.0, runs[0].bytes));
        assert!(runs[2].positions <= 40.0 + 18.0 && runs[2].positions > 50.0, "{}", runs[2].positions);
        assert!(14 * runs[2].bytes <= 5 * runs[0].bytes);
        let times = model.first_token(&tokens, KvType::F32, &policies[..3], 2).unwrap();
        assert!(times.len() == 3 && times.iter().all(|t| !t.is_zero()));
    }
}

/// A model one row of whose embedding is NaN.
fn broken(row: usize) -> LlamaRuntime {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama_tiny_untied");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let tensor = &header["model.embed_tokens.weight"];
    let [width, start] = [&tensor["shape"][1], &tensor["data_offsets"][0]].map(|v| v.as_u64().unwrap() as usize);
    let at = 8 + n + start + row * width * 4;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    LlamaRuntime::load(&Checkpoint::open(dir.path()).unwrap(), 2).unwrap()
}

/// A step that fails leaves a sequence as it was, or empty; in an engine the others get their tokens all the same.
#[test]
fn a_failing_step_under_a_policy() {
    let model = broken(9);
    let good: Vec<u32> = text(120, 128).into_iter().map(|id| if id == 9 { 10 } else { id }).collect();
    for (policy, after) in [(window(4, 20), [45, 50]), (entropy(40, 4, 16), [45, 0])] {
        for (before, after) in [45, 50].into_iter().zip(after) {
            let mut pool = model.new_pool(40 * BLOCK, 128, KvType::F16, policy).unwrap();
            let (mut sequence, mut out) = (pool.new_sequence(), Vec::new());
            let mut run = |sequence: &mut _, tokens: &[u32], pool: &mut _| {
                let done = model.step(pool, &mut [Entry { sequence, tokens, logits: Logits::Last }], &mut out);
                done.map(|()| bits(&out))
            };
            run(&mut sequence, &good[..before], &mut pool).unwrap();
            let bad = if before == 45 { vec![1, 9] } else { [&good[before..100], &[9]].concat() };
            assert_eq!(run(&mut sequence, &bad, &mut pool).unwrap_err().exit_code(), 6);
            assert_eq!(sequence.len(), after, "{policy:?} {before}");
            let got = run(&mut sequence, &good[after..], &mut pool).unwrap();
            assert_eq!(got, bits(&at_once_of(&model, &good, policy, KvType::F16)[119 * 128..]), "{policy:?} {before}");
            pool.release(sequence);
            assert_eq!(pool.free_blocks(), 40);
        }
        let mut cache = model.new_cache_of(256, KvType::F16, policy).unwrap();
        let long = [&good[..], &good[..], &[9]].concat();
        assert!(model.forward(&long, &mut cache, Logits::Last).is_err());
        assert!(cache.is_empty(), "the first of two pieces was done");
        let pool = model.new_pool(60 * BLOCK, 200, KvType::F16, policy).unwrap();
        let settings = EngineSettings { share_prefixes: false, step_tokens: 100, ..Default::default() };
        let mut e = Engine::new(&model, None, pool, settings).unwrap();
        let request = |prompt: &[u32]| Request { prompt: prompt.to_vec(), max_tokens: 20, ..Default::default() };
        let ids =
            [&good[..90], &[&good[20..70], &[9, 1]].concat()[..], &good[5..60]].map(|p| e.submit(request(p)).unwrap());
        let (mut out, mut all) = (Vec::new(), Vec::new());
        while !e.is_idle() {
            e.step(&mut out);
            all.append(&mut out);
        }
        let end = |id| all.iter().find_map(|o: &Output| o.finished.as_ref().filter(|_| o.id == id)).unwrap();
        assert_eq!(end(ids[1]).reason.as_ref().unwrap_err().exit_code(), 6);
        for (id, prompt) in [(ids[0], &good[..90]), (ids[2], &good[5..60])] {
            let mut cache = model.new_cache_of(200, KvType::F16, policy).unwrap();
            let mut sampler = Sampler::new(Sampling::default()).unwrap();
            let go = &mut |_| ControlFlow::Continue(());
            let want = generate(&model, &mut cache, prompt, 20, 128, &mut sampler, go).unwrap();
            let got: Vec<u32> = all.iter().filter(|o| o.id == id).filter_map(|o| o.token).collect();
            let ended = got.len() < 20;
            assert!(ended || got == want.tokens, "{policy:?}");
            assert!(!ended || end(id).reason.is_err(), "only the broken row of a generated token ends it early");
        }
        assert_eq!(e.pool().free_blocks(), 60);
    }
}

fn alone(model: &LlamaRuntime, r: &Request, longest: usize, policy: KvPolicy) -> (Vec<u32>, FinishReason) {
    let mut cache = model.new_cache_of(longest, KvType::F32, policy).unwrap();
    let mut sampler = Sampler::new(r.sampling).unwrap();
    let vocab = model.config().vocab_size;
    let made = generate(model, &mut cache, &r.prompt, r.max_tokens, vocab, &mut sampler, &mut |id| {
        if r.ends.contains(&id) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let mut made = made.unwrap();
    if made.finish == FinishReason::Cancelled {
        made.tokens.pop();
        made.finish = FinishReason::Stop;
    }
    (made.tokens, made.finish)
}

/// Requests come and go in too little memory: each gets the tokens that it gets alone under the same policy.
#[test]
fn an_engine_under_a_policy_changes_no_token() {
    let policies = [window(4, 24), entropy(40, 4, 16), window(0, 3), entropy(20, 2, 2), window(33, 64)];
    let (mut preemptions, mut shared, mut cancelled) = (0, 0, 0);
    for round in 0..30usize {
        let policy = policies[round % policies.len()];
        let mut rng = ChaCha8Rng::seed_from_u64(round as u64);
        let model = load(["llama_tiny", "mixtral_tiny", "qwen3_tiny"][round / 5 % 3], 1 + round % 2);
        let vocab = model.config().vocab_size as u32;
        let longest = 220;
        let step_tokens = rng.random_range(1..80);
        let blocks = policy.blocks(longest, step_tokens) + rng.random_range(0..6);
        let share_prefixes = policy.shares() && round % 2 == 0;
        let settings = EngineSettings { sequences: 4, step_tokens, share_prefixes };
        let pool = model.new_pool(blocks * BLOCK, longest, KvType::F32, policy).unwrap();
        let mut e = Engine::new(&model, None, pool, settings).unwrap();
        let mut asked: Vec<(RequestId, Request)> = Vec::new();
        let (mut tokens, mut ends, mut gone) = (HashMap::<RequestId, Vec<u32>>::new(), HashMap::new(), Vec::new());
        let mut out: Vec<Output> = Vec::new();
        while asked.len() < 9 || !e.is_idle() {
            if asked.len() < 9 && rng.random_bool(0.3) {
                let mut prompt: Vec<u32> = match asked.last() {
                    Some((_, r)) if rng.random_bool(0.6) => r.prompt[..rng.random_range(1..=r.prompt.len())].to_vec(),
                    _ => Vec::new(),
                };
                let more = rng.random_range(1..100);
                prompt.extend((0..more).map(|_| rng.random_range(0..vocab)));
                prompt.truncate(longest);
                let sampling = Sampling { temperature: 1.0, seed: rng.random(), ..Default::default() };
                let ends = model.config().eos_token_ids.clone();
                let r = Request { prompt, max_tokens: rng.random_range(1..90), sampling, ends, ..Default::default() };
                asked.push((e.submit(r.clone()).unwrap(), r));
            }
            if rng.random_bool(0.02) && !asked.is_empty() {
                let id = asked[rng.random_range(0..asked.len())].0;
                gone.extend(e.cancel(id).map(|_| id));
            }
            e.step(&mut out);
            for o in out.drain(..) {
                tokens.entry(o.id).or_default().extend(o.token);
                if let Some(end) = o.finished {
                    preemptions += end.stats.preemptions;
                    shared += end.stats.shared_tokens;
                    ends.insert(o.id, end.reason.unwrap());
                }
            }
        }
        assert_eq!(e.blocks_in_use(), 0);
        if !share_prefixes {
            assert_eq!(e.pool().free_blocks(), blocks);
        }
        for (id, r) in &asked {
            let (want, reason) = alone(&model, r, longest, policy);
            let got = tokens.remove(id).unwrap_or_default();
            if gone.contains(id) {
                assert!(want.starts_with(&got), "{round} {policy:?}");
            } else {
                assert_eq!((got, ends[id]), (want, reason), "{round} {policy:?}");
            }
        }
        cancelled += gone.len();
    }
    assert!(preemptions > 5 && shared > 100 && cancelled > 5, "{preemptions} {shared} {cancelled}");
}
