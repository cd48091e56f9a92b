//! SentencePiece vocabularies of the BPE kind (`tokenizer.ggml.model` "llama": Llama 2, Mistral): tokens with scores on one side, a
//! BPE with `byte_fallback` and merges in `tokenizer.json` on the other. Not byte-level BPE (see `pretokenizer.rs`).
//!
//! llama.cpp joins the two neighbours whose joint token has the highest score, the leftmost of equal ones; `tokenizers` those whose
//! merge comes first. `transformers` makes merges of scores in one of two orders ([`Rule`]), and a list of merges that scores give in
//! such an order is what is taken here, either way.

use serde_json::{Value, json};
use std::collections::HashMap;

/// What stands for a space.
const SPACE: &str = "\u{2581}";
/// The score of an id that takes no part in joining.
const LOWEST: f32 = -1e9;

/// How merges of different tokens, and those of one token, follow each other where scores leave it open.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// Of equal scores the longest left half first, then the longest right one (transformers since 4.40).
    ByLength,
    /// Token by token in the order of ids, the halves of one token by theirs (before).
    ById,
}

/// The text of a byte's token.
pub(crate) fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// The merges of tokens with these scores; `None` is a token that takes no part in joining.
fn merges(tokens: &[(&str, Option<f32>)], rule: Rule) -> Vec<(usize, usize)> {
    let joins = tokens.iter().enumerate().filter(|(_, (_, score))| score.is_some());
    let ids: HashMap<&str, usize> = joins.clone().map(|(id, (text, _))| (*text, id)).collect();
    let mut all: Vec<(f32, usize, usize, usize)> = Vec::new();
    for (id, (text, score)) in joins {
        let halves =
            text.char_indices().skip(1).filter_map(|(at, _)| Some((*ids.get(&text[..at])?, *ids.get(&text[at..])?)));
        let mut halves: Vec<(usize, usize)> = halves.collect();
        halves.sort_unstable();
        all.extend(halves.into_iter().map(|(l, r)| (score.unwrap_or(LOWEST), id, l, r)));
    }
    let chars = |id: usize| tokens[id].0.chars().count();
    // Both sorts are stable.
    match rule {
        Rule::ById => all.sort_by(|a, b| b.0.total_cmp(&a.0)),
        Rule::ByLength => {
            let mut keyed: Vec<_> = all.into_iter().map(|m| ((chars(m.2), chars(m.3)), m)).collect();
            keyed.sort_by(|(x, a), (y, b)| b.0.total_cmp(&a.0).then(y.cmp(x)));
            all = keyed.into_iter().map(|(_, m)| m).collect();
        }
    }
    all.into_iter().map(|(_, _, l, r)| (l, r)).collect()
}

/// The merges of tokens with these scores, as texts with one space between: `given` if scores give them in an order of
/// `transformers`, the usual ones where there are none; `None` for others.
pub(crate) fn merges_of(tokens: &[(&str, Option<f32>)], given: Option<Vec<&str>>) -> Option<Vec<String>> {
    let text = |rule: Rule| -> Vec<String> {
        merges(tokens, rule).into_iter().map(|(l, r)| format!("{} {}", tokens[l].0, tokens[r].0)).collect()
    };
    match given {
        None => Some(text(Rule::ByLength)),
        Some(given) => [Rule::ByLength, Rule::ById].into_iter().map(text).find(|made| *made == given),
    }
}

/// Scores that give these merges: less and less, from the first merge on; tokens whose merges are mixed get the same. `joins` says which
/// tokens take part. `None` where no scores give them.
pub(crate) fn scores_of(tokens: &[&str], joins: &[bool], list: &[String]) -> Option<Vec<f32>> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    let mut made = Vec::with_capacity(list.len());
    for merge in list {
        let (l, r) = merge.split_once(' ')?;
        made.push(*ids.get(format!("{l}{r}").as_str())?);
    }
    let mut last = vec![0; tokens.len()];
    for (at, id) in made.iter().enumerate() {
        last[*id] = at;
    }
    let mut scores = vec![LOWEST; tokens.len()];
    let (mut class, mut end) = (0usize, 0usize);
    for (at, id) in made.iter().enumerate() {
        if at == 0 || at > end {
            class += 1;
        }
        end = if at > end { last[*id] } else { end.max(last[*id]) };
        scores[*id] = -(class as f32);
    }
    // Whole numbers up to 2^24 are f32 numbers.
    let with: Vec<(&str, Option<f32>)> =
        tokens.iter().zip(joins).zip(&scores).map(|((text, joins), score)| (*text, joins.then_some(*score))).collect();
    merges_of(&with, Some(list.iter().map(String::as_str).collect()))?;
    Some(scores)
}

/// The normalizer of `tokenizer.json`; `prefix`: a text, and what follows a special token, gets a space in front.
pub(crate) fn normalizer(prefix: bool) -> Value {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    match prefix {
        true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}),
        false => replace,
    }
}

/// The way back.
pub(crate) fn decoder(prefix: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}

/// Whether the steps of a file's normalizer and pre-tokenizer are those of [`normalizer`], and with which prefix. `Metaspace` without
/// splitting and with "never" is another spelling of no prefix; "always" and "first" are none of a prefix ([`metaspace_differs`]).
pub(crate) fn prefix_of(normalizers: &[Value], pre_tokenizers: &[Value]) -> Option<bool> {
    let parts = |prefix: bool| match normalizer(prefix) {
        v if v["type"] == "Sequence" => v["normalizers"].as_array().cloned().unwrap_or_default(),
        v => vec![v],
    };
    match (normalizers, pre_tokenizers) {
        (steps, []) => [true, false].into_iter().find(|prefix| steps == parts(*prefix)),
        ([], [one]) if one["type"] == "Metaspace" && one["replacement"] == SPACE && one["split"] == false => {
            (one["prepend_scheme"] == "never").then_some(false)
        }
        _ => None,
    }
}

/// Why a `Metaspace` among these steps puts its prefix elsewhere than llama.cpp does, which puts one before every text and behind
/// every special token.
pub(crate) fn metaspace_differs(pre_tokenizers: &[Value]) -> Option<&'static str> {
    let one = pre_tokenizers.iter().find(|p| p["type"] == "Metaspace")?;
    match one["prepend_scheme"].as_str()? {
        "always" => {
            Some("\"always\" puts no \u{2581} before a text that begins with a space or with \u{2581}, llama.cpp does")
        }
        "first" => Some("\"first\" puts no \u{2581} behind a special token, llama.cpp does"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_and_merges_give_each_other() {
        let texts = ["a", "b", "c", "ab", "bc", "abc", "\u{2581}", "\u{2581}a", "x", "<0x41>"];
        let score = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 0.0, -4.0, 0.0, 0.0];
        let joins: Vec<bool> = texts.iter().map(|t| *t != "<0x41>").collect();
        let tokens: Vec<(&str, Option<f32>)> =
            texts.iter().zip(score).zip(&joins).map(|((t, s), j)| (*t, j.then_some(s))).collect();
        let made = merges_of(&tokens, None).unwrap();
        assert_eq!(made, ["b c", "a b", "ab c", "a bc", "\u{2581} a"]);
        let old = ["b c", "a b", "a bc", "ab c", "\u{2581} a"].map(str::to_owned);
        for list in [&made[..], &old] {
            assert!(merges_of(&tokens, Some(list.iter().map(String::as_str).collect())).is_some());
            let scores = scores_of(&texts, &joins, list).unwrap();
            assert_eq!((scores[4], scores[3], scores[5], scores[7]), (-1.0, -2.0, -3.0, -4.0));
        }
        // A merge that is missing, and merges of two tokens that are mixed.
        assert_eq!(scores_of(&texts, &joins, &made[..4]), None);
        let mixed = ["b c", "a bc", "a b", "ab c", "\u{2581} a"].map(str::to_owned);
        assert_eq!(scores_of(&texts, &joins, &mixed), None);
    }

    #[test]
    fn runs_of_spaces_share_a_score() {
        let texts: Vec<String> = (1..=4).map(|n| SPACE.repeat(n)).collect();
        let tokens: Vec<(&str, Option<f32>)> = texts.iter().map(|t| (t.as_str(), Some(-1e9))).collect();
        let made = merges_of(&tokens, None).unwrap();
        let lengths: Vec<(usize, usize)> = made
            .iter()
            .map(|m| m.split_once(' ').unwrap())
            .map(|(l, r)| (l.chars().count(), r.chars().count()))
            .collect();
        assert_eq!(lengths, [(3, 1), (2, 2), (2, 1), (1, 3), (1, 2), (1, 1)]);
        let refs: Vec<&str> = texts.iter().map(String::as_str).collect();
        let scores = scores_of(&refs, &[true; 4], &made).unwrap();
        // The last merge is the only one of two, and comes after all others.
        assert_eq!(scores[1..], [-2.0, -1.0, -1.0]);
    }

    #[test]
    fn spellings_of_the_prefix() {
        let steps = |prefix| match normalizer(prefix) {
            v if v["type"] == "Sequence" => v["normalizers"].as_array().unwrap().clone(),
            v => vec![v],
        };
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false});
        assert_eq!(prefix_of(&steps(true), &[]), Some(true));
        assert_eq!(prefix_of(&steps(false), &[]), Some(false));
        assert_eq!(prefix_of(&[], &[metaspace("never")]), Some(false));
        assert_eq!(metaspace_differs(&[metaspace("never")]), None);
        for scheme in ["always", "first"] {
            assert_eq!(prefix_of(&[], &[metaspace(scheme)]), None);
            assert!(metaspace_differs(&[metaspace(scheme)]).unwrap().contains(scheme));
        }
        assert_eq!(prefix_of(&[], &[]), None);
    }
}
