//! Held-out text as token ids: files and documents, with the bytes and words that each token spells. Not the windows (see
//! `dsq_eval::strided`), not the model.

use crate::{error::CliError, input};
use dsq_checkpoint::Checkpoint;
use dsq_eval::{EvalError, Window, strided};
use dsq_runtime::TextTokenizer;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// From as many documents on they are the blocks of the bootstrap; of fewer it would know too little, and windows are.
const BLOCKS: usize = 20;

/// A text and its tokens.
#[derive(Debug, Default)]
pub struct Document {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token, the bytes and words of the text up to its end; empty where only ids are known.
    spelled: Vec<[u32; 2]>,
}

/// All documents.
#[derive(Debug)]
pub struct Documents {
    list: Vec<Document>,
}

/// A line of a .jsonl file.
#[derive(Deserialize)]
struct Line {
    text: String,
}

impl Documents {
    /// Reads texts: a file is a document; of a file whose name ends in .jsonl each line is, an object with the field `text`.
    ///
    /// # Errors
    /// Files that cannot be read, are no UTF-8 or no such lines; ids outside of the vocabulary.
    pub fn of_texts(files: &[PathBuf], model: &Checkpoint, vocab: usize) -> Result<Self, CliError> {
        let tokenizer = TextTokenizer::new(model)?;
        let mut list = Vec::new();
        for file in files {
            let text = input::text(file)?;
            let texts = match file.extension().is_some_and(|e| e == "jsonl") {
                true => lines(file, &text)?,
                false => vec![text],
            };
            for text in texts {
                list.push(Document::of_text(&text, &tokenizer)?);
            }
        }
        if let Some(id) = list.iter().flat_map(|d| &d.ids).find(|id| **id as usize >= vocab) {
            let name = model.path().display();
            return Err(CliError::new(
                3,
                format!("{name}: tokenizer.json: expected ids below {vocab} (vocab_size), got {id}"),
            ));
        }
        Ok(Self { list })
    }

    /// Reads a JSON list of lists of token ids.
    ///
    /// # Errors
    /// A file that cannot be read or is something else; ids outside of the vocabulary.
    pub fn of_ids(file: &Path, vocab: usize) -> Result<Self, CliError> {
        let bytes = input::bytes(file)?;
        let lists: Vec<Vec<u32>> = serde_json::from_slice(&bytes).map_err(|e| {
            CliError::new(3, format!("{}: expected a JSON list of lists of token ids: {e}", file.display()))
        })?;
        for (i, list) in lists.iter().enumerate() {
            if let Some(id) = list.iter().find(|id| **id as usize >= vocab) {
                let problem = format!("list {i}: expected ids below {vocab} (vocab_size), got {id}");
                return Err(CliError::new(3, format!("{}: {problem}", file.display())));
            }
        }
        Ok(Self { list: lists.into_iter().map(|ids| Document { ids, spelled: Vec::new() }).collect() })
    }

    /// Keeps the first `max` tokens of all documents together.
    pub fn truncate(&mut self, max: usize) {
        let mut left = max;
        self.list.retain_mut(|d| {
            d.ids.truncate(left);
            d.spelled.truncate(left);
            left -= d.ids.len();
            !d.ids.is_empty()
        });
    }

    /// The documents.
    pub fn list(&self) -> &[Document] {
        &self.list
    }

    /// What the blocks of the bootstrap are.
    pub fn blocks(&self) -> &'static str {
        if self.list.iter().filter(|d| d.ids.len() >= 2).count() >= BLOCKS { "documents" } else { "windows" }
    }

    /// The windows of all documents, see [`strided`].
    ///
    /// # Errors
    /// As there.
    pub fn windows(&self, context: usize, stride: usize) -> Result<Vec<Window<'_>>, EvalError> {
        let join = self.blocks() == "documents";
        let mut all = Vec::new();
        for document in &self.list {
            for (i, (place, from)) in strided(document.ids.len(), context, stride)?.enumerate() {
                let [bytes, words] = document.spelled(place.start + from, place.end);
                all.push(Window { tokens: &document.ids[place], from, joins: join && i > 0, bytes, words });
            }
        }
        Ok(all)
    }

    /// Digest of the ids, document by document.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for document in &self.list {
            hash.update((document.ids.len() as u64).to_le_bytes());
            document.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl Document {
    fn of_text(text: &str, tokenizer: &TextTokenizer) -> Result<Self, CliError> {
        let (ids, ends) = tokenizer.encode_with_ends(text)?;
        // Where words begin, as `str.split()` of Python cuts them.
        let mut starts = Vec::new();
        let mut space = true;
        for (at, c) in text.char_indices() {
            if space && !c.is_whitespace() {
                starts.push(at);
            }
            space = c.is_whitespace();
        }
        let spelled = ends.iter().map(|&end| [end as u32, starts.partition_point(|at| *at < end) as u32]).collect();
        Ok(Self { ids, spelled })
    }

    /// Bytes and words that tokens `from..to` spell.
    fn spelled(&self, from: usize, to: usize) -> [u32; 2] {
        let up_to = |end: usize| end.checked_sub(1).and_then(|i| self.spelled.get(i)).copied().unwrap_or([0; 2]);
        let ([b0, w0], [b1, w1]) = (up_to(from), up_to(to));
        [b1 - b0, w1 - w0]
    }
}

fn lines(file: &Path, text: &str) -> Result<Vec<String>, CliError> {
    let text_of = |(i, line): (usize, &str)| {
        serde_json::from_str::<Line>(line).map(|line| line.text).map_err(|e| {
            CliError::new(
                3,
                format!("{}: line {}: expected an object with a text in `text`: {e}", file.display(), i + 1),
            )
        })
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(text_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(lens: &[usize]) -> Documents {
        Documents { list: lens.iter().map(|&n| Document { ids: vec![1; n], spelled: Vec::new() }).collect() }
    }

    #[test]
    fn max_tokens_counts_over_all_documents() {
        let mut documents = ids(&[5, 5, 5]);
        documents.truncate(7);
        assert_eq!(documents.list().iter().map(|d| d.ids.len()).collect::<Vec<_>>(), [5, 2]);
    }

    #[test]
    fn f088_bad_token_files_name_the_list_and_the_id() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ids.json");
        for (text, want) in
            [("[[1, 99]]", "list 0: expected ids below 50"), ("[1]", "list of lists"), ("[[-1]]", "list of lists")]
        {
            std::fs::write(&file, text).unwrap();
            let err = Documents::of_ids(&file, 50).unwrap_err();
            assert!(err.to_string().contains(want) && err.code() == 3, "{err}");
        }
        assert_eq!(Documents::of_ids(&dir.path().join("none"), 50).unwrap_err().code(), 4);
    }

    #[test]
    fn many_documents_are_blocks_and_few_are_not() {
        let (few, many) = (ids(&[9; 19]), ids(&[9; 20]));
        assert_eq!((few.blocks(), many.blocks()), ("windows", "documents"));
        let joined = |d: &Documents| d.windows(4, 4).unwrap().iter().filter(|w| w.joins).count();
        assert_eq!((joined(&few), joined(&many)), (0, 20), "two windows of four and a token alone");
        assert_ne!(few.sha256(), many.sha256());
        assert_ne!(ids(&[2, 3]).sha256(), ids(&[3, 2]).sha256());
    }

    #[test]
    fn lines_of_jsonl_are_documents() {
        let file = Path::new("a.jsonl");
        let texts = lines(file, "{\"text\": \"a\\nb\", \"id\": 3}\n\n{\"text\": \"\"}\n").unwrap();
        assert_eq!(texts, ["a\nb", ""]);
        let e = lines(file, "{\"text\": \"a\"}\n{\"body\": 1}").unwrap_err();
        assert!(e.to_string().contains("a.jsonl: line 2: expected an object with a text") && e.code() == 3, "{e}");
    }
}
