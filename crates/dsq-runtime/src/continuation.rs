//! A context and a continuation as token ids, cut where one ends and the other begins. Not their scores (see `packed.rs`), not the
//! tokenizer (see `tokenizer.rs`).

use crate::{RuntimeError, Specials, TextTokenizer};

/// Tokens of which the last ones are to be predicted from those before them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Continuation {
    /// All tokens, at least two. The last one is predicted and never fed to a model.
    pub tokens: Vec<u32>,
    /// The first that is predicted, at least 1; `from..tokens.len()` are.
    pub from: usize,
    /// Tokens of the context that were cut off on the left because the model has fewer positions.
    pub cut: usize,
}

impl Continuation {
    /// What a model is given: every token but the last.
    pub fn fed(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    /// The tokens that are predicted.
    pub fn targets(&self) -> &[u32] {
        &self.tokens[self.from..]
    }
}

/// Makes [`Continuation`]s, as lm-evaluation-harness does: white space at the end of the context goes over to the continuation; then the
/// continuation's tokens are those of the whole text behind as many as the context alone has.
#[derive(Debug)]
pub struct Continuations<'t> {
    tokenizer: &'t TextTokenizer,
    prefix: Vec<u32>,
    /// What an empty context is.
    empty: Option<u32>,
    limit: usize,
}

impl<'t> Continuations<'t> {
    /// For a model of `limit` positions. Every text begins with what the tokenizer puts before every text (its post-processor's BOS, or
    /// nothing), as `transformers` has it by default; special tokens inside a text are text. Where nothing is put before, an empty
    /// context is `bos`, or the first token that ends an answer where that is `None`.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn new(tokenizer: &'t TextTokenizer, bos: Option<u32>, limit: usize) -> Result<Self, RuntimeError> {
        let empty = bos.or(tokenizer.ends().first().copied());
        Ok(Self { tokenizer, prefix: tokenizer.prefix()?, empty, limit })
    }

    /// The tokens of `context` and `continuation`. Where the model has too few positions the context loses its first tokens.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a continuation without a token of its own, an empty context where nothing stands for it, and as
    /// [`TextTokenizer::encode`]; [`RuntimeError::TooLong`] for a continuation of more tokens than the model has positions.
    pub fn encode(&self, context: &str, continuation: &str) -> Result<Continuation, RuntimeError> {
        let input = |problem: String| RuntimeError::Input { what: "continuation", problem };
        let encode = |text: &str| self.tokenizer.encode(text, Specials::AsText);
        let given = context.trim_end();
        let whole = encode(&[context, continuation].concat())?;
        let given_len = if given.is_empty() { 0 } else { encode(given)?.len() };
        let mut tokens = self.prefix.clone();
        if tokens.is_empty() && given_len == 0 {
            let problem =
                "expected a context, or a model with a BOS or end token to stand for an empty one, got neither";
            tokens.push(self.empty.ok_or_else(|| input(problem.into()))?);
        }
        let from = tokens.len() + given_len;
        tokens.extend(whole);
        if from >= tokens.len() {
            let problem = format!(
                "{continuation:?}: expected at least one token behind the context's {from}, got {} for the whole text",
                tokens.len()
            );
            return Err(input(problem));
        }
        let targets = tokens.len() - from;
        if targets > self.limit {
            let of = "positions of the model";
            return Err(RuntimeError::TooLong { what: "continuation", limit: self.limit, of, got: targets });
        }
        // The last token is not fed.
        let cut = tokens.len().saturating_sub(self.limit + 1);
        tokens.drain(..cut);
        Ok(Continuation { tokens, from: from - cut, cut })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::{byte_level, load};
    use serde_json::json;

    #[test]
    fn the_cut_lies_behind_the_context_and_its_white_space_goes_over() {
        let t = load(&byte_level()).unwrap();
        let of = |context: &str, continuation: &str, limit| {
            let c = Continuations::new(&t, Some(0), limit).unwrap().encode(context, continuation).unwrap();
            (t.decode(&c.tokens).unwrap(), c.tokens.len(), c.from, c.cut)
        };
        assert_eq!(of("ab", " cd", 10), ("ab cd".into(), 5, 2, 0));
        assert_eq!(of("ab \n", "cd", 10), ("ab \ncd".into(), 6, 2, 0));
        // Five tokens need four positions.
        assert_eq!(of("ab", " cd", 4), ("ab cd".into(), 5, 2, 0));
        assert_eq!(of("ab", " cd", 3), ("b cd".into(), 4, 1, 1));
        // An empty context is the BOS; here it is special and has no text.
        assert_eq!(of("", "cd", 10), ("cd".into(), 3, 1, 0));
        assert_eq!(of("  ", "cd", 10), ("  cd".into(), 5, 1, 0));
        assert_eq!(of("", "cd", 2), ("cd".into(), 3, 1, 0));
        let c = Continuations::new(&t, Some(0), 9).unwrap().encode("a", "bc").unwrap();
        assert_eq!((c.fed().len(), c.targets()), (2, &c.tokens[1..]));
    }

    #[test]
    fn what_the_tokenizer_puts_before_every_text_stands_once() {
        let mut v = byte_level();
        v["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}});
        let t = load(&v).unwrap();
        let all = Continuations::new(&t, Some(1), 10).unwrap();
        for (context, from) in [("ab", 3), ("", 1)] {
            let c = all.encode(context, "c").unwrap();
            assert_eq!((c.tokens[0], c.tokens.len(), c.from), (0, from + 1, from), "{context:?}");
            assert!(!c.tokens[1..].contains(&0) && !c.tokens.contains(&1));
        }
    }

    #[test]
    fn what_cannot_be_scored_is_an_error() {
        let t = load(&byte_level()).unwrap();
        let e = Continuations::new(&t, None, 10).unwrap().encode("", "a").unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("expected a context"), "{e}");
        let e = Continuations::new(&t, Some(0), 3).unwrap().encode("a", "bcde").unwrap_err();
        assert!(
            e.to_string().contains("continuation: expected at most 3 tokens") && e.to_string().contains("got 4"),
            "{e}"
        );
        // A merge over the border leaves the continuation nothing.
        let mut v = byte_level();
        v["model"]["merges"] = json!([["a", "b"]]);
        v["model"]["vocab"]["ab"] = json!(300);
        let t = load(&v).unwrap();
        let e = Continuations::new(&t, Some(0), 9).unwrap().encode("a", "b").unwrap_err();
        assert!(e.to_string().contains("expected at least one token behind the context's 1, got 1"), "{e}");
        // With more behind it the rest is scored, as the harness does.
        assert_eq!(Continuations::new(&t, Some(0), 9).unwrap().encode("a", "bc").unwrap().targets().len(), 1);
    }
}
