//! Many requests at once on one model: requests come and go at any step, prompts are read in pieces beside sequences that
//! generate, memory is shared by sequences that begin alike, and a request gets the tokens that it would get alone. Not the
//! forward pass (see `llama.rs`), not the network (see the server), no threads of its own.
//!
//! A step takes one token of every sequence that generates, then pieces of prompts up to the token budget, oldest request
//! first. Requests are admitted in order, each when the blocks of its whole text are free or held only for reuse. When a running
//! sequence needs a block and none is left, the newest running request loses its own and waits in front of all others; its
//! text is computed again later. The oldest is never stopped, and alone it always fits, so every request ends.

use crate::prefix::{Known, Prefixes};
use crate::{
    Entry, FinishReason, KvPool, LlamaRuntime, Logits, RuntimeError, Sampler, Sampling, Sequence, StopStrings,
    TextStream, TextTokenizer,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A number that names a request of one engine; later requests have larger ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What is asked of the model.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// How tokens are chosen; the seed is this request's own.
    pub sampling: Sampling,
    /// Ids that end the answer and are not part of it, usually [`TextTokenizer::ends`].
    pub ends: Vec<u32>,
    /// Texts that end the answer and are not part of it.
    pub stops: StopStrings,
}

/// How an engine works. None of this changes a token of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSettings {
    /// Most sequences that run at once.
    pub sequences: usize,
    /// Most tokens of a step. Sequences that generate come first; where there are more of them, it is their number.
    pub step_tokens: usize,
    /// Whether sequences that begin alike share blocks, also with those that have ended.
    pub share_prefixes: bool,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { sequences: 64, step_tokens: 192, share_prefixes: true }
    }
}

/// What a request cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were there already when it was first admitted.
    pub shared_tokens: usize,
    /// Tokens generated, those of a stop string among them, without the end token.
    pub tokens: usize,
    /// Times that it lost its memory and began again.
    pub preemptions: usize,
    /// From [`Engine::submit`] to its admission.
    pub queued: Duration,
    /// From [`Engine::submit`] to its first token.
    pub first_token: Option<Duration>,
    /// From [`Engine::submit`] to its end.
    pub total: Duration,
}

/// The end of a request.
#[derive(Debug)]
pub struct Finished {
    /// Why it ended; an error where its numbers broke, which the other requests do not notice.
    pub reason: Result<FinishReason, RuntimeError>,
    /// What it cost.
    pub stats: RequestStats,
}

/// What a step made for a request: a token, or the end, or both.
#[derive(Debug)]
pub struct Output {
    /// The request.
    pub id: RequestId,
    /// The new token; none where the answer ended before it.
    pub token: Option<u32>,
    /// Text that can be shown now: whole characters, nothing that may become a stop string.
    pub text: String,
    /// The end, with the last output of a request.
    pub finished: Option<Finished>,
}

/// A request on its way.
#[derive(Debug)]
struct Job<'m> {
    id: RequestId,
    request: Request,
    sampler: Sampler,
    text: Option<TextStream<'m>>,
    /// The prompt and what was generated.
    tokens: Vec<u32>,
    /// Holds the first of `tokens`, and never all of them between steps.
    sequence: Sequence,
    known: Known,
    /// Tokens of this step.
    planned: usize,
    stats: RequestStats,
    submitted: Instant,
    admitted: bool,
    ended: bool,
}

impl Job<'_> {
    /// Tokens that the sequence lacks.
    fn pending(&self) -> usize {
        self.tokens.len() - self.sequence.len()
    }

    /// One token more, or the end.
    fn next_token(&mut self, logits: &mut [f32], capacity: usize) -> Output {
        let mut output = Output { id: self.id, token: None, text: String::new(), finished: None };
        let reason = match self.choose(logits, &mut output) {
            Ok(None) if self.stats.tokens == self.request.max_tokens || self.sequence.len() == capacity => {
                Ok(FinishReason::Length)
            }
            Ok(None) => return output,
            Ok(Some(reason)) => Ok(reason),
            Err(e) => Err(e),
        };
        output.finished = Some(self.end(reason, &mut output.text));
        output
    }

    /// Chooses a token and makes text of it; says why the answer ends with it, if it does.
    fn choose(&mut self, logits: &mut [f32], output: &mut Output) -> Result<Option<FinishReason>, RuntimeError> {
        let id = self.sampler.next(logits)?;
        self.stats.first_token.get_or_insert_with(|| self.submitted.elapsed());
        if self.request.ends.contains(&id) {
            return Ok(Some(FinishReason::Stop));
        }
        self.tokens.push(id);
        self.stats.tokens += 1;
        output.token = Some(id);
        let Some(stream) = &mut self.text else { return Ok(None) };
        output.text = stream.push(id)?;
        Ok(stream.stopped().then_some(FinishReason::Stop))
    }

    /// The end, with the text that was held back.
    fn end(&mut self, reason: Result<FinishReason, RuntimeError>, text: &mut String) -> Finished {
        let Some(stream) = &mut self.text else { return self.finish(reason) };
        let rest = stream.finish().map(|rest| text.push_str(&rest));
        // The rest of a character that no token completes may complete a stop string.
        let stopped = stream.stopped();
        let reason = reason.and_then(|reason| rest.map(|()| if stopped { FinishReason::Stop } else { reason }));
        self.finish(reason)
    }

    fn finish(&mut self, reason: Result<FinishReason, RuntimeError>) -> Finished {
        self.ended = true;
        self.stats.total = self.submitted.elapsed();
        Finished { reason, stats: self.stats }
    }
}

/// Runs requests on a model and the memory of their sequences.
#[derive(Debug)]
pub struct Engine<'m> {
    model: &'m LlamaRuntime,
    tokenizer: Option<&'m TextTokenizer>,
    pool: KvPool,
    settings: EngineSettings,
    prefixes: Prefixes,
    /// Positions of the longest sequence that fits.
    capacity: usize,
    /// Ids that may be chosen.
    vocabulary: usize,
    waiting: VecDeque<Job<'m>>,
    /// Oldest first.
    running: Vec<Job<'m>>,
    logits: Vec<f32>,
    last: u64,
}

impl<'m> Engine<'m> {
    /// An engine. Without a tokenizer it makes tokens alone: no text, no stop strings, every id may be chosen.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for settings of zero, for a pool without blocks, and for shared prefixes where the pool's policy prunes.
    pub fn new(
        model: &'m LlamaRuntime,
        tokenizer: Option<&'m TextTokenizer>,
        pool: KvPool,
        settings: EngineSettings,
    ) -> Result<Self, RuntimeError> {
        let fits = pool.policy().blocks(pool.longest(), settings.step_tokens) <= pool.blocks();
        let capacity = if fits { pool.longest() } else { pool.longest().min(pool.blocks() * KvPool::block_len()) };
        for (what, value) in [
            ("sequences", settings.sequences),
            ("tokens of a step", settings.step_tokens),
            ("positions of the KV cache", capacity),
        ] {
            if value == 0 {
                return Err(RuntimeError::Input { what, problem: "expected at least 1, got 0".into() });
            }
        }
        if settings.share_prefixes && !pool.policy().shares() {
            let problem = format!("expected false under the KV policy {}, got true", pool.policy().name());
            return Err(RuntimeError::Input { what: "share_prefixes", problem });
        }
        let vocabulary = tokenizer.map_or(usize::MAX, TextTokenizer::vocab_size).min(model.config().vocab_size);
        let prefixes = Prefixes::new(pool.blocks());
        Ok(Self {
            model,
            tokenizer,
            pool,
            settings,
            prefixes,
            capacity,
            vocabulary,
            waiting: VecDeque::new(),
            running: Vec::with_capacity(settings.sequences),
            logits: Vec::new(),
            last: 0,
        })
    }

    /// Takes a request in. It runs as soon as there is room, in the order of the submissions.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] for a prompt that can never fit, naming both numbers; [`RuntimeError::Input`] for an empty prompt,
    /// ids beyond the vocabulary, no token to generate, and settings out of range. The engine stays as it was.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RuntimeError> {
        let input = |what, problem: String| Err(RuntimeError::Input { what, problem });
        let rows = self.model.config().vocab_size;
        if request.prompt.is_empty() {
            return input("prompt", "expected at least one token, got none".into());
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= rows) {
            return input("prompt", format!("expected ids below the vocabulary's {rows} rows, got {id}"));
        }
        if request.max_tokens == 0 {
            return input("max_tokens", "expected at least 1, got 0".into());
        }
        if request.prompt.len() > self.capacity {
            let of = if self.capacity < self.pool.longest() {
                "positions of the KV cache"
            } else {
                "positions of the context"
            };
            return Err(RuntimeError::TooLong { what: "prompt", limit: self.capacity, of, got: request.prompt.len() });
        }
        let text = match self.tokenizer {
            Some(tokenizer) => Some(TextStream::new(tokenizer, request.stops.clone())),
            None if request.stops == StopStrings::default() => None,
            None => return input("stop", "expected a tokenizer for stop strings, got none".into()),
        };
        let mut sampler = Sampler::new(request.sampling)?;
        sampler.observe(&request.prompt);
        let longest = request.prompt.len().saturating_add(request.max_tokens).min(self.capacity + 1);
        let mut tokens = Vec::with_capacity(longest);
        tokens.extend_from_slice(&request.prompt);
        self.last += 1;
        let id = RequestId(self.last);
        let stats = RequestStats { prompt_tokens: request.prompt.len(), ..Default::default() };
        self.waiting.push_back(Job {
            id,
            request,
            sampler,
            text,
            tokens,
            sequence: Sequence::default(),
            known: Known::NONE,
            planned: 0,
            stats,
            submitted: Instant::now(),
            admitted: false,
            ended: false,
        });
        Ok(id)
    }

    /// Ends a request now and frees its blocks; `None` where it has ended already.
    pub fn cancel(&mut self, id: RequestId) -> Option<Finished> {
        let mut job = match self.running.iter().position(|j| j.id == id) {
            Some(at) => self.running.remove(at),
            None => {
                let at = self.waiting.iter().position(|j| j.id == id)?;
                self.waiting.remove(at)?
            }
        };
        self.free(&mut job);
        Some(job.finish(Ok(FinishReason::Cancelled)))
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Blocks that running sequences have.
    pub fn blocks_in_use(&self) -> usize {
        self.pool.blocks() - self.pool.free_blocks() - self.prefixes.idle(&self.pool)
    }

    /// The memory of the sequences.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// One pass over the model for all requests that have room. Appends what it made to `out`; does nothing where nothing waits or
    /// runs. What is wrong with one request ends that request alone.
    pub fn step(&mut self, out: &mut Vec<Output>) {
        self.plan();
        let all = 0..self.running.len();
        if self.running.iter().all(|j| j.planned == 0) {
            return;
        }
        if self.forward(all.clone()).is_ok() {
            self.choose(all, out);
        } else {
            // Someone's numbers broke the whole step, which changed nothing, or emptied sequences that are pruned: each goes alone.
            for i in all {
                if self.running[i].planned == 0 {
                    continue;
                }
                match self.forward(i..i + 1) {
                    Ok(()) => self.choose(i..i + 1, out),
                    Err(e) => {
                        let job = &mut self.running[i];
                        let finished = Some(job.finish(Err(e)));
                        out.push(Output { id: job.id, token: None, text: String::new(), finished });
                    }
                }
            }
        }
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].ended {
                let mut job = self.running.remove(i);
                self.free(&mut job);
            } else {
                i += 1;
            }
        }
    }

    /// Decides how many tokens of each request the next pass takes, and gives their sequences the blocks.
    fn plan(&mut self) {
        self.running.iter_mut().for_each(|j| j.planned = 0);
        // One token of each that generates, then pieces of prompts.
        for generating in [true, false] {
            let mut i = 0;
            while i < self.running.len() {
                let pending = self.running[i].pending();
                if (pending == 1) == generating {
                    let tokens = if generating { 1 } else { pending.min(self.budget()) };
                    self.plan_one(i, tokens);
                }
                i += 1;
            }
        }
        while self.running.len() < self.settings.sequences && self.budget() > 0 {
            let Some(job) = self.waiting.pop_front() else { break };
            if let Err(job) = self.admit(job) {
                self.waiting.push_front(*job);
                break;
            }
        }
    }

    /// Tokens that the next pass may still take.
    fn budget(&self) -> usize {
        self.settings.step_tokens.saturating_sub(self.running.iter().map(|j| j.planned).sum())
    }

    /// Plans `tokens` of a running request; where blocks are lacking, those of ended sequences are forgotten, and then the newest
    /// requests lose theirs, at last this one.
    fn plan_one(&mut self, i: usize, tokens: usize) {
        let len = self.running[i].sequence.len() + tokens;
        while tokens > 0 && i < self.running.len() {
            let lacking = self.pool.lacking(&self.running[i].sequence, len).saturating_sub(self.pool.free_blocks());
            if lacking == 0 {
                self.pool.grow(&mut self.running[i].sequence, len);
                self.running[i].planned = tokens;
                return;
            }
            // One a request at least, so that a full list is not searched for every block.
            if self.prefixes.forget(&mut self.pool, lacking.max(self.running.len())) == 0
                && let Some(mut newest) = self.running.pop()
            {
                self.free(&mut newest);
                newest.stats.preemptions += 1;
                self.waiting.push_front(newest);
            }
        }
    }

    /// Lets a request run if its whole text and one token more have room, or gives it back.
    fn admit(&mut self, mut job: Job<'m>) -> Result<(), Box<Job<'m>>> {
        if self.settings.share_prefixes {
            (job.sequence, job.known) = self.prefixes.share(&mut self.pool, &job.tokens);
        } else {
            job.sequence = self.pool.new_sequence();
        }
        let len = (job.tokens.len() + 1).min(self.capacity);
        let bound = self.pool.policy().blocks(len, self.settings.step_tokens);
        if self.pool.lacking(&job.sequence, len).min(bound) > self.pool.free_blocks() + self.prefixes.idle(&self.pool) {
            self.free(&mut job);
            return Err(Box::new(job));
        }
        if !job.admitted {
            job.admitted = true;
            job.stats.queued = job.submitted.elapsed();
            job.stats.shared_tokens = job.sequence.len();
        }
        let tokens = job.pending().min(self.budget());
        self.running.push(job);
        self.plan_one(self.running.len() - 1, tokens);
        Ok(())
    }

    /// Takes a request's blocks back; the full ones stay known until their memory is needed.
    fn free(&mut self, job: &mut Job) {
        self.prefixes.touch(&job.tokens, job.known);
        self.pool.release(std::mem::take(&mut job.sequence));
        job.known = Known::NONE;
        job.planned = 0;
    }

    /// Takes the planned tokens of these running requests through the model.
    fn forward(&mut self, which: Range<usize>) -> Result<(), RuntimeError> {
        let planned = self.running[which].iter_mut().filter(|j| j.planned > 0);
        let mut batch: Vec<Entry> = planned
            .map(|job| {
                let (from, end) = (job.sequence.len(), job.sequence.len() + job.planned);
                let logits = if end == job.tokens.len() { Logits::Last } else { Logits::None };
                Entry { sequence: &mut job.sequence, tokens: &job.tokens[from..end], logits }
            })
            .collect();
        self.model.step(&mut self.pool, &mut batch, &mut self.logits)
    }

    /// Chooses the next token of those of these requests whose whole text has been read by the last pass.
    fn choose(&mut self, which: Range<usize>, out: &mut Vec<Output>) {
        let mut rows = self.logits.chunks_exact_mut(self.model.config().vocab_size);
        for job in self.running[which].iter_mut().filter(|j| j.planned > 0) {
            if self.settings.share_prefixes {
                self.prefixes.note(&mut self.pool, &job.sequence, &job.tokens, &mut job.known);
            }
            if job.pending() == 0
                && let Some(row) = rows.next()
            {
                out.push(job.next_token(&mut row[..self.vocabulary], self.capacity));
            }
        }
    }
}
