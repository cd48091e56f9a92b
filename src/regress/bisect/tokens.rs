//! What two tokenizers make of the same text: ids, what is put before a text, special tokens. Not what other ids do to the logits.

use super::{Cause, Finding};
use crate::error::CliError;
use dsq_checkpoint::Checkpoint;
use dsq_runtime::{Specials, TextTokenizer};

/// Tokens of a text that a message shows.
const SHOWN: usize = 6;

/// A text of a single letter: what its ids have more than the letter's own is put there by the tokenizer.
const LETTER: &str = "x";

/// How the tokenizers of two models differ on `texts`. Where both models have none there is nothing to compare; where one has, that is a
/// finding.
///
/// # Errors
/// A tokenizer that cannot be used, a text that one cannot take.
pub fn differing(good: &Checkpoint, bad: &Checkpoint, texts: &[String]) -> Result<Vec<Finding>, CliError> {
    let has = |model: &Checkpoint| model.tokenizer_json().map(|t| t.is_some());
    match (has(good)?, has(bad)?) {
        (true, true) => {}
        (false, false) => return Ok(Vec::new()),
        (in_good, _) => {
            let side = if in_good { "GOOD" } else { "BAD" };
            return Ok(vec![Finding::new(Cause::Tokenizer, "tokenizer.json", format!("only in {side}"))]);
        }
    }
    let (a, b) = (TextTokenizer::new(good)?, TextTokenizer::new(bad)?);
    let mut out = Vec::new();
    // Before a text: prompts get it, the windows of an evaluation do not.
    let (x, y) = (around(&a)?, around(&b)?);
    if x != y {
        let show = |ids: &[u32], t: &TextTokenizer| match ids {
            [] => Ok("nothing".to_owned()),
            ids => named(ids, t),
        };
        for (what, i) in [("before", 0), ("behind", 1)] {
            if x[i] != y[i] {
                let kind = format!("{} in GOOD, {} in BAD", show(&x[i], &a)?, show(&y[i], &b)?);
                out.push(Finding::new(Cause::Tokenizer, format!("special tokens {what} every text"), kind));
            }
        }
    }
    for (i, text) in texts.iter().enumerate() {
        let (x, y) = (a.encode(text, Specials::AsText)?, b.encode(text, Specials::AsText)?);
        if let Some(kind) = first_difference(&x, &y) {
            out.push(Finding::new(Cause::Tokenizer, format!("ids of text {i}"), kind));
            break;
        }
    }
    if a.vocab_size() != b.vocab_size() {
        let kind = format!("{} in GOOD, {} in BAD", a.vocab_size(), b.vocab_size());
        out.push(Finding::new(Cause::Tokenizer, "vocabulary", kind));
    }
    if a.specials() != b.specials() {
        let only = |of: &TextTokenizer, other: &TextTokenizer| -> Vec<String> {
            let missing = of.specials().iter().filter(|s| !other.specials().contains(s));
            missing.take(SHOWN).map(|(text, id)| format!("{text:?} ({id})")).collect()
        };
        let kind = format!("only in GOOD: {:?}, only in BAD: {:?}", only(&a, &b), only(&b, &a));
        out.push(Finding::new(Cause::Tokenizer, "special tokens", kind));
    }
    if a.ends() != b.ends() {
        let kind = format!("{:?} in GOOD, {:?} in BAD", a.ends(), b.ends());
        out.push(Finding::new(Cause::Tokenizer, "ids that end an answer", kind));
    }
    Ok(out)
}

/// What a tokenizer puts before and behind a text.
fn around(t: &TextTokenizer) -> Result<[Vec<u32>; 2], CliError> {
    let (bare, full) = (t.encode(LETTER, Specials::AsText)?, t.encode_prompt(LETTER)?);
    let at = full.windows(bare.len().max(1)).position(|w| w == bare).unwrap_or(0);
    Ok([full[..at].to_vec(), full.get(at + bare.len()..).unwrap_or_default().to_vec()])
}

fn named(ids: &[u32], t: &TextTokenizer) -> Result<String, CliError> {
    let name = |id: &u32| match t.specials().iter().find(|(_, s)| s == id) {
        Some((text, _)) => Ok(format!("{id} {text:?}")),
        None => t.decode(&[*id]).map(|text| format!("{id} {text:?}")),
    };
    Ok(ids.iter().map(name).collect::<Result<Vec<_>, _>>()?.join(" "))
}

/// Where two lists of ids part, in words; `None` where they are the same.
pub fn first_difference(good: &[u32], bad: &[u32]) -> Option<String> {
    if good == bad {
        return None;
    }
    let at = good.iter().zip(bad).take_while(|(a, b)| a == b).count();
    let show = |ids: &[u32]| ids[at.min(ids.len())..].iter().take(SHOWN).copied().collect::<Vec<u32>>();
    let (a, b) = (show(good), show(bad));
    Some(format!("{} ids in GOOD, {} in BAD; from id {at} on {a:?} in GOOD, {b:?} in BAD", good.len(), bad.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_part_where_they_do() {
        assert_eq!(first_difference(&[1, 2], &[1, 2]), None);
        let kind = first_difference(&[1, 2, 3], &[1, 9, 3, 4]).unwrap();
        assert_eq!(kind, "3 ids in GOOD, 4 in BAD; from id 1 on [2, 3] in GOOD, [9, 3, 4] in BAD");
        assert!(first_difference(&[1], &[]).unwrap().contains("from id 0 on [1] in GOOD, [] in BAD"));
    }
}
