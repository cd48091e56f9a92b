//! Logits of a reference model in a compressed file, so that it runs once for many models. Not exact: see [`LogitsWriter`] for how
//! far a logit can be off, and what that does to a divergence.

use crate::{EvalError, Window};
use flate2::Compression;
use flate2::read::{ZlibDecoder, ZlibEncoder};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read, Write};

/// Version of the file's form.
const FORMAT: u32 = 1;
/// Steps of a coded logit in a nat.
const STEPS: f32 = 128.0;
/// Largest logits of a row that are kept as they are.
const EXACT: usize = 64;

/// What logits are of. Those of another model, of other tokens or other windows are no substitute, so a reader compares it whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogitsOf {
    /// Digest of the reference's tensors and config.
    pub model_sha256: String,
    /// Digest of the token ids, document by document.
    pub tokens_sha256: String,
    /// Tokens in a window.
    pub context: usize,
    /// Tokens from the beginning of a window to that of the next.
    pub stride: usize,
    /// Logits in a row.
    pub vocab: usize,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: u32,
    /// Version that wrote it, for people.
    dsq: String,
    of: LogitsOf,
}

/// Writes logits window by window, of predicted tokens only.
///
/// The file: a line of JSON that says what they are of, then for each row its length (u32, little endian) and a zlib stream (which
/// has a checksum) of: the largest logit `m` (f32); 65 pairs of id (u32) and logit (f32), the 64 largest and that of the token that
/// follows; `vocab` codes `round(128 (m - z))` (u16, at most 65,535), first all low bytes, then all high ones.
///
/// So a logit is exact where it is one of the largest or scores the text, and within 1/256 elsewhere (unless it lies more than 511
/// below `m`). Of a distribution with mass `r` outside of its 64 largest, log probabilities are off by at most `r / 256`, and a
/// divergence from it by that much at worst; errors have random signs, so in practice by `r / 256^2 / 6`, about 1e-6.
#[derive(Debug)]
pub struct LogitsWriter<W> {
    out: W,
    vocab: usize,
}

/// Reads what [`LogitsWriter`] wrote, in the same order.
#[derive(Debug)]
pub struct LogitsReader<R> {
    input: R,
    vocab: usize,
}

fn damaged(got: impl ToString) -> EvalError {
    EvalError::Logits { expected: "a file of logits that dsq wrote".into(), got: got.to_string() }
}

impl<W: Write> LogitsWriter<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// What writing gives.
    pub fn new(mut out: W, of: &LogitsOf) -> std::io::Result<Self> {
        let header = Header { format: FORMAT, dsq: env!("CARGO_PKG_VERSION").into(), of: of.clone() };
        writeln!(out, "{}", serde_json::to_string(&header)?)?;
        Ok(Self { out, vocab: of.vocab })
    }

    /// Adds the logits `[L, vocab]` of a window of `L` tokens, and puts in their place what a reader will give.
    ///
    /// # Errors
    /// What writing gives.
    ///
    /// # Panics
    /// When `logits` has another length.
    pub fn window(&mut self, window: &Window<'_>, logits: &mut [f32]) -> std::io::Result<()> {
        assert_eq!(logits.len(), window.tokens.len() * self.vocab, "a row of logits for each token");
        let first = window.from - 1;
        let predicted = &mut logits[first * self.vocab..(window.tokens.len() - 1) * self.vocab];
        // The evaluation that gets them next says where, and ends.
        if predicted.iter().any(|z| !z.is_finite()) {
            return Ok(());
        }
        let targets = &window.tokens[window.from..];
        let rows = predicted.par_chunks_exact_mut(self.vocab).zip(targets).map(|(row, &target)| {
            let bytes = encode(row, target as usize);
            decode(&bytes, row).map_err(std::io::Error::other)?;
            let mut packed = Vec::new();
            ZlibEncoder::new(&bytes[..], Compression::fast()).read_to_end(&mut packed)?;
            Ok(packed)
        });
        for row in rows.collect::<std::io::Result<Vec<_>>>()? {
            self.out.write_all(&(row.len() as u32).to_le_bytes())?;
            self.out.write_all(&row)?;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// What writing gives.
    pub fn finish(mut self) -> std::io::Result<W> {
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<R: BufRead> LogitsReader<R> {
    /// Opens a file, which must be of what `of` says.
    ///
    /// # Errors
    /// [`EvalError::Logits`] naming what differs.
    pub fn new(mut input: R, of: &LogitsOf) -> Result<Self, EvalError> {
        let mut line = Vec::new();
        input.by_ref().take(1 << 16).read_until(b'\n', &mut line).map_err(damaged)?;
        let header: Header = serde_json::from_slice(&line).map_err(damaged)?;
        if header.format != FORMAT {
            let got = format!("format {}", header.format);
            return Err(EvalError::Logits { expected: format!("format {FORMAT}"), got });
        }
        let named = |of: &LogitsOf| {
            [
                ("model", of.model_sha256.clone()),
                ("tokens", of.tokens_sha256.clone()),
                ("context", of.context.to_string()),
                ("stride", of.stride.to_string()),
                ("vocabulary", of.vocab.to_string()),
            ]
        };
        for ((what, expected), (_, got)) in named(of).into_iter().zip(named(&header.of)) {
            if expected != got {
                let [expected, got] = [expected, got].map(|value| format!("logits of {what} {value}"));
                return Err(EvalError::Logits { expected, got });
            }
        }
        Ok(Self { input, vocab: of.vocab })
    }

    /// The logits `[L, vocab]` of the next window of `L` tokens; rows that predict nothing of it are zero.
    ///
    /// # Errors
    /// [`EvalError::Logits`] for a file that ends or is damaged.
    pub fn window(&mut self, window: &Window<'_>) -> Result<Vec<f32>, EvalError> {
        let (len, vocab) = (window.tokens.len(), self.vocab);
        // No row is longer than its codes and exact logits: zlib stores what it cannot shrink, with 5 bytes for each 16 KiB.
        let most = row_bytes(vocab) + row_bytes(vocab) / 1000 + 64;
        let mut packed = Vec::new();
        for _ in window.from..len {
            let mut size = [0; 4];
            self.input.read_exact(&mut size).map_err(damaged)?;
            let size = u32::from_le_bytes(size) as usize;
            if size > most {
                return Err(damaged(format!("a row of {size} bytes")));
            }
            let mut row = vec![0; size];
            self.input.read_exact(&mut row).map_err(damaged)?;
            packed.push(row);
        }
        let mut logits = vec![0.0; len * vocab];
        let predicted = &mut logits[(window.from - 1) * vocab..(len - 1) * vocab];
        packed.par_iter().zip(predicted.par_chunks_exact_mut(vocab)).try_for_each(|(row, logits)| {
            let mut bytes = Vec::with_capacity(row_bytes(vocab));
            let stream = ZlibDecoder::new(&row[..]).take(row_bytes(vocab) as u64 + 1);
            { stream }.read_to_end(&mut bytes).map_err(damaged)?;
            decode(&bytes, logits)
        })?;
        Ok(logits)
    }
}

/// Bytes of a row before it is compressed.
fn row_bytes(vocab: usize) -> usize {
    4 + 8 * (EXACT + 1) + 2 * vocab
}

fn encode(logits: &[f32], target: usize) -> Vec<u8> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let value = |i: &u32| logits[*i as usize];
    // Equal ones by their place, so that the first choice stays what it is.
    let larger = |a: &u32, b: &u32| value(b).total_cmp(&value(a)).then(a.cmp(b));
    let kept = EXACT.min(order.len());
    if kept < order.len() {
        order.select_nth_unstable_by(kept, larger);
    }
    let max = order[..kept].iter().map(value).fold(f32::NEG_INFINITY, f32::max);
    let mut bytes = Vec::with_capacity(row_bytes(logits.len()));
    bytes.extend(max.to_le_bytes());
    // A small vocabulary names its token again and again.
    for id in order[..kept].iter().copied().chain(std::iter::repeat_n(target as u32, EXACT + 1 - kept)) {
        bytes.extend(id.to_le_bytes());
        bytes.extend(value(&id).to_le_bytes());
    }
    let code = |z: f32| ((max - z) * STEPS).round_ties_even().clamp(0.0, 65_535.0) as u16;
    let codes: Vec<u16> = logits.iter().map(|&z| code(z)).collect();
    bytes.extend(codes.iter().map(|c| *c as u8));
    bytes.extend(codes.iter().map(|c| (c >> 8) as u8));
    bytes
}

fn decode(bytes: &[u8], logits: &mut [f32]) -> Result<(), EvalError> {
    let vocab = logits.len();
    if bytes.len() != row_bytes(vocab) {
        return Err(damaged(format!("a row of {} bytes for {vocab} logits", bytes.len())));
    }
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let max = f32::from_le_bytes(four(0));
    let (low, high) = bytes[row_bytes(0)..].split_at(vocab);
    for ((z, low), high) in logits.iter_mut().zip(low).zip(high) {
        *z = max - f32::from(u16::from_le_bytes([*low, *high])) / STEPS;
    }
    for pair in 0..=EXACT {
        let (id, value) = (u32::from_le_bytes(four(4 + 8 * pair)) as usize, f32::from_le_bytes(four(8 + 8 * pair)));
        let place = logits.get_mut(id).ok_or_else(|| damaged(format!("logit {id} of {vocab}")))?;
        *place = value;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TextEval;

    fn of(vocab: usize) -> LogitsOf {
        LogitsOf { model_sha256: "m".into(), tokens_sha256: "t".into(), context: 8, stride: 4, vocab }
    }

    /// Logits as models have them: a bell of width 3.
    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let unit = |i: u64| {
            let mut s = (seed << 40 | i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            s = (s ^ s >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            ((s ^ s >> 32) >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..len as u64).map(|i| (0..12).map(|k| unit(12 * i + k)).sum::<f32>().mul_add(3.0, -18.0)).collect()
    }

    fn windows(tokens: &[u32]) -> [Window<'_>; 2] {
        [Window::of(&tokens[..6]), Window { from: 3, ..Window::of(&tokens[2..]) }]
    }

    fn written(vocab: usize, tokens: &[u32]) -> (Vec<u8>, Vec<Vec<f32>>) {
        let mut writer = LogitsWriter::new(Vec::new(), &of(vocab)).unwrap();
        let mut given = Vec::new();
        for (i, window) in windows(tokens).iter().enumerate() {
            let mut logits = noise(window.tokens.len() * vocab, i as u64);
            writer.window(window, &mut logits).unwrap();
            given.push(logits);
        }
        (writer.finish().unwrap(), given)
    }

    #[test]
    fn what_is_read_is_what_the_writer_gave_and_near_what_it_got() {
        for vocab in [1, 2, 63, 64, 65, 3000] {
            let tokens: Vec<u32> = (0..9).map(|i| (i * 7919 + 5) % vocab as u32).collect();
            let (file, given) = written(vocab, &tokens);
            let mut reader = LogitsReader::new(&file[..], &of(vocab)).unwrap();
            for (i, window) in windows(&tokens).iter().enumerate() {
                let logits = reader.window(window).unwrap();
                let original = noise(window.tokens.len() * vocab, i as u64);
                for at in window.from..window.tokens.len() {
                    let row = (at - 1) * vocab..at * vocab;
                    assert_eq!(logits[row.clone()], given[i][row.clone()]);
                    let (got, original) = (&logits[row.clone()], &original[row]);
                    let target = tokens[if i == 0 { 0 } else { 2 } + at] as usize;
                    assert_eq!(got[target], original[target]);
                    // Half a step, and the rounding of f32 at this size.
                    assert!(got.iter().zip(original).all(|(a, b)| (a - b).abs() <= 0.5 / STEPS + 4e-6));
                    let mut sorted = original.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    let exact = got.iter().zip(original).filter(|(a, b)| a == b && **b >= sorted[EXACT.min(vocab) - 1]);
                    assert_eq!(exact.count(), EXACT.min(vocab));
                }
            }
            assert!(reader.window(&Window::of(&tokens[..2])).is_err(), "no more");
        }
    }

    #[test]
    fn a_divergence_from_coded_logits_is_that_from_the_logits_to_the_bound() {
        let (vocab, tokens) = (20_000, (0..40).collect::<Vec<u32>>());
        let (reference, noise) = (noise(40 * vocab, 5), noise(40 * vocab, 6));
        let model: Vec<f32> = reference.iter().zip(&noise).map(|(z, e)| z + 0.1 * e).collect();
        let mut coded = reference.clone();
        LogitsWriter::new(Vec::new(), &of(vocab)).unwrap().window(&Window::of(&tokens), &mut coded).unwrap();
        let kl = |reference: &[f32]| {
            let mut eval = TextEval::new();
            eval.window(&tokens, &model, Some(reference)).unwrap();
            let metrics = eval.finish().unwrap();
            (metrics.kl.unwrap().value, metrics.reference_perplexity.unwrap().value.ln(), metrics.top1_agreement)
        };
        let (plain, coded) = (kl(&reference), kl(&coded));
        assert!(plain.0 > 0.02 && (plain.0 - coded.0).abs() < 1.0 / 256.0 && plain.2 == coded.2, "{plain:?} {coded:?}");
        assert!((plain.0 - coded.0).abs() < 1e-5 && (plain.1 - coded.1).abs() < 1e-4, "{plain:?} {coded:?}");
    }

    #[test]
    fn f110_logits_of_something_else_and_damaged_files_are_errors() {
        let tokens: Vec<u32> = (0..9).collect();
        let (file, _) = written(100, &tokens);
        for (other, what) in [
            (LogitsOf { model_sha256: "x".into(), ..of(100) }, "expected logits of model x, got logits of model m"),
            (LogitsOf { tokens_sha256: "x".into(), ..of(100) }, "tokens x"),
            (LogitsOf { context: 9, ..of(100) }, "expected logits of context 9, got logits of context 8"),
            (LogitsOf { stride: 1, ..of(100) }, "stride 1"),
            (of(101), "vocabulary 101"),
        ] {
            let e = LogitsReader::new(&file[..], &other).unwrap_err();
            assert!(e.to_string().contains(what) && e.exit_code() == 3, "{e}");
        }
        assert!(LogitsReader::new(&b"{}\n"[..], &of(100)).is_err() && LogitsReader::new(&b""[..], &of(100)).is_err());
        let start = file.iter().position(|b| *b == b'\n').unwrap() + 1;
        let read = |file: &[u8]| LogitsReader::new(file, &of(100)).and_then(|mut r| r.window(&windows(&tokens)[0]));
        let whole = read(&file).unwrap();
        let mut caught = 0;
        for at in (start..start + 1500).step_by(7) {
            let mut broken = file.clone();
            broken[at] ^= 0x20;
            // A stream ends in bits that mean nothing.
            assert!(read(&broken).is_err() || read(&broken).unwrap() == whole, "byte {at}");
            caught += usize::from(read(&broken).is_err());
            assert!(read(&file[..at]).is_err(), "cut at {at}");
        }
        assert!(caught > 200, "{caught} of 215");
    }
}
