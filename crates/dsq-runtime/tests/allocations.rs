//! After the first requests an engine's steps ask for no memory worth the name, whatever comes and goes: counted by the allocator of
//! this program. Not the memory that a request brings with it (its tokens, what its sampler chooses from).

use dsq_checkpoint::Checkpoint;
use dsq_runtime::{Activations, Engine, EngineSettings, KvPolicy, KvPool, KvType, LlamaRuntime, Request};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

/// Bytes from which on a piece of memory counts: lists of a step's sequences, layers and parts are smaller, buffers of rows are not.
const COUNTS: usize = 1024;

thread_local! {
    /// How many such pieces this thread asked for; tests run beside each other.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= COUNTS {
            ASKED.with(|asked| asked.set(asked.get() + 1));
        }
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps of requests of all lengths, some cancelled, on one thread (the one that is counted). Returns the most that a step of the second
/// half asked for.
fn asked(name: &str, mode: Activations, kv: KvType, policy: KvPolicy) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    let model = LlamaRuntime::load(&Checkpoint::open(&folder).unwrap(), 1).unwrap().with_activations(mode);
    let pool = model.new_pool(60 * KvPool::block_len(), 96, kv, policy).unwrap();
    let settings = EngineSettings { sequences: 6, step_tokens: 24, share_prefixes: pool.policy().shares() };
    let mut engine = Engine::new(&model, None, pool, settings).unwrap();
    let (mut seed, mut out, mut most, mut ids) = (7u32, Vec::with_capacity(64), 0, Vec::new());
    let mut next = move |n: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) % n
    };
    for step in 0..600 {
        while engine.waiting() < 2 {
            let prompt = (0..1 + next(60)).map(|_| next(90)).collect();
            let max_tokens = 1 + next(30) as usize;
            ids.push(engine.submit(Request { prompt, max_tokens, ..Request::default() }).unwrap());
        }
        if next(20) == 0 {
            engine.cancel(ids.swap_remove(next(ids.len() as u32) as usize));
        }
        out.clear();
        let before = ASKED.get();
        engine.step(&mut out);
        if step >= 300 {
            most = most.max(ASKED.get() - before);
        }
    }
    most
}

#[test]
fn steps_of_a_warm_engine_ask_for_no_memory() {
    let window = KvPolicy::Window { sinks: 2, window: 24 };
    for name in ["llama_tiny", "mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v3_tiny", "qwen3_tiny"] {
        for kv in [KvType::F32, KvType::F16, KvType::Int8, KvType::Fp8] {
            assert_eq!(asked(name, Activations::Float, kv, KvPolicy::Full), 0, "{name} {kv:?}");
        }
        assert_eq!(asked(name, Activations::Float, KvType::F16, window), 0, "{name}, window");
    }
    // Weights of four bits, with columns in activation order and without.
    for name in ["ct_folder_asymmetric", "ct_order_asymmetric"] {
        for mode in [Activations::Float, Activations::Int8] {
            assert_eq!(asked(name, mode, KvType::F16, KvPolicy::Full), 0, "{name} {mode:?}");
        }
    }
}
