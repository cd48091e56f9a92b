//! Generated text as it may be shown: whole characters only, ended by stop strings, and held back while it may be the
//! beginning of one. Not the tokens (see `generate.rs`) and not their decoding (see `tokenizer.rs`).

use crate::{RuntimeError, StreamDecoder, TextTokenizer};

/// Texts that end an answer and are not part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopStrings(Vec<String>);

impl StopStrings {
    /// A set of stop strings, possibly none.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for an empty string, which would end every answer.
    pub fn new(texts: Vec<String>) -> Result<Self, RuntimeError> {
        if let Some(i) = texts.iter().position(String::is_empty) {
            let problem = format!("expected texts of at least one character, got an empty one (number {})", i + 1);
            return Err(RuntimeError::Input { what: "stop", problem });
        }
        Ok(Self(texts))
    }

    /// Where an answer `text` ends: the byte before the stop string that is complete first; of those complete at the same
    /// character, the longest. So it does not matter in which pieces the text came.
    fn find(&self, text: &str) -> Option<usize> {
        let found = self.0.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
        found.min().map(|(_, at)| at)
    }

    /// Bytes at the end of `text` that may be the beginning of a stop string.
    fn open(&self, text: &str) -> usize {
        let of = |stop: &String| {
            let begins = |&n: &usize| stop.is_char_boundary(n) && text.ends_with(&stop[..n]);
            (1..stop.len()).rev().find(begins).unwrap_or(0)
        };
        self.0.iter().map(of).max().unwrap_or(0)
    }
}

/// The text of a stream of tokens.
#[derive(Debug)]
pub struct TextStream<'t> {
    decoder: StreamDecoder<'t>,
    stops: StopStrings,
    /// Text that is certain, but may become a stop string.
    held: String,
    stopped: bool,
}

impl<'t> TextStream<'t> {
    /// The start of an answer.
    pub fn new(tokenizer: &'t TextTokenizer, stops: StopStrings) -> Self {
        Self { decoder: StreamDecoder::new(tokenizer), stops, held: String::new(), stopped: false }
    }

    /// Takes one token; returns the text that can be shown now, possibly none.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, RuntimeError> {
        let piece = self.decoder.push(id)?;
        Ok(self.take(&piece, false))
    }

    /// The rest, when no token follows: an incomplete character becomes U+FFFD, and what was held back is shown.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn finish(&mut self) -> Result<String, RuntimeError> {
        let piece = self.decoder.finish()?;
        Ok(self.take(&piece, true))
    }

    /// Whether a stop string has ended the text; nothing is shown after it.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    fn take(&mut self, piece: &str, last: bool) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(piece);
        let end = self.stops.find(&self.held);
        self.stopped = end.is_some();
        let shown = match end {
            Some(at) => at,
            None if last => self.held.len(),
            None => self.held.len() - self.stops.open(&self.held),
        };
        let rest = self.held.split_off(shown);
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Specials;
    use crate::tokenizer::tests::{byte_level, load};
    use proptest::prelude::*;

    fn stops(texts: &[&str]) -> StopStrings {
        StopStrings::new(texts.iter().map(|t| (*t).to_string()).collect()).unwrap()
    }

    /// What is shown of `text`, byte after byte, and whether it was stopped.
    fn shown(texts: &[&str], text: &str) -> (Vec<String>, bool) {
        let t = load(&byte_level()).unwrap();
        let mut stream = TextStream::new(&t, stops(texts));
        let mut out = Vec::new();
        for id in t.encode(text, Specials::AsText).unwrap() {
            out.push(stream.push(id).unwrap());
            if stream.stopped() {
                return (out, true);
            }
        }
        out.push(stream.finish().unwrap());
        (out, stream.stopped())
    }

    #[test]
    fn c071_text_is_held_while_it_may_become_a_stop_string() {
        let (out, stopped) = shown(&["END", "\n\n"], "abEN\n cENDx");
        assert_eq!(out, ["a", "b", "", "", "EN", "\n ", "c", "", "", ""]);
        assert!(stopped);
        // What was held is shown when no token follows.
        assert_eq!(shown(&["END"], "aEN"), (vec!["a".into(), String::new(), String::new(), "EN".into()], false));
        // A stop string that begins again inside itself.
        assert_eq!(shown(&["aab"], "aaab").0.concat(), "a");
        // Complete first wins, whatever began first.
        assert_eq!(shown(&["abcd", "bc"], "xabcd").0.concat(), "xa");
        assert_eq!(shown(&["bc", "abc"], "xabc").0.concat(), "x");
        // Characters of several bytes.
        assert_eq!(shown(&["漢字"], "a漢漢字b").0.concat(), "a漢");
        assert_eq!(shown(&["🙂"], "a🙃b"), (["a", "", "", "", "🙃", "b", ""].map(String::from).to_vec(), false));
        assert_eq!(StopStrings::new(vec!["a".into(), String::new()]).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn an_incomplete_character_at_the_end_is_told_and_may_stop() {
        let t = load(&byte_level()).unwrap();
        let ids = t.encode("a🙂", Specials::AsText).unwrap();
        for (texts, want, stops_here) in [(&[][..], "a\u{fffd}", false), (&["\u{fffd}"], "a", true)] {
            let mut stream = TextStream::new(&t, stops(texts));
            let mut out: String = ids[..4].iter().map(|&id| stream.push(id).unwrap()).collect();
            assert_eq!(out, "a");
            out.push_str(&stream.finish().unwrap());
            assert_eq!((out.as_str(), stream.stopped()), (want, stops_here));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// In any pieces: what is shown is the text before the stop string that is complete first, and nothing is shown late
        /// that cannot become part of a stop string.
        #[test]
        fn pieces_do_not_matter(
            text in "[abé]{0,14}",
            texts in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(1usize..4, 20),
        ) {
            let t = load(&byte_level()).unwrap();
            let set = StopStrings::new(texts.clone()).unwrap();
            let mut end = text.len();
            'search: for (at, c) in text.char_indices() {
                let to = at + c.len_utf8();
                if let Some(longest) = texts.iter().filter(|s| text[..to].ends_with(s.as_str())).map(String::len).max() {
                    end = to - longest;
                    break 'search;
                }
            }
            let mut stream = TextStream::new(&t, set);
            let (mut out, mut came) = (String::new(), String::new());
            let mut chars = text.chars();
            for n in cuts {
                let piece: String = chars.by_ref().take(n).collect();
                came.push_str(&piece);
                out.push_str(&stream.take(&piece, false));
                if !stream.stopped() {
                    let held = &came[out.len()..];
                    prop_assert!(held.is_empty() || texts.iter().any(|s| s.starts_with(held) && s.len() > held.len()));
                }
            }
            out.push_str(&stream.take("", true));
            prop_assert_eq!(out, &text[..end]);
        }
    }
}
