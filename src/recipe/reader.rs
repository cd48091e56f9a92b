//! Reads a TOML recipe with positions: every error names the file, line and column, shows the line with a caret, and
//! suggests the nearest key. Knows TOML, not the keys (see `mod.rs`).

use crate::error::CliError;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

type Span = std::ops::Range<usize>;

/// The text of a recipe and of its `--set` overrides, for error messages.
pub struct Source {
    path: PathBuf,
    /// The recipe, then each override on a line of its own.
    text: String,
    /// Where the overrides begin in `text`.
    overrides_at: usize,
}

/// A value and where it stands.
struct Node {
    span: Span,
    value: Value,
}

enum Value {
    Bool(bool),
    Integer(i64),
    Float(f64),
    String(String),
    Array(Vec<Node>),
    Table(Table),
    /// A date, or a number that does not fit.
    Other(&'static str),
}

/// Key -> (where the key stands, value).
type Table = BTreeMap<String, (Span, Node)>;

impl Source {
    /// An error at `span`: `FILE:LINE:COLUMN: message`, the line, and a caret under it.
    fn error(&self, span: &Span, message: impl std::fmt::Display) -> CliError {
        let at = span.start.min(self.text.len());
        let line_start = self.text[..at].rfind('\n').map_or(0, |i| i + 1);
        let line_end = self.text[at..].find('\n').map_or(self.text.len(), |i| at + i);
        let line = &self.text[line_start..line_end];
        if line_start >= self.overrides_at {
            return CliError::usage(format!("--set {line}: {message}"));
        }
        let column = self.text[line_start..at].chars().count() + 1;
        let width = self.text[at..span.end.clamp(at, line_end)].chars().count().max(1);
        let caret = format!("{}{}", " ".repeat(column - 1), "^".repeat(width));
        let number = self.text[..line_start].matches('\n').count() + 1;
        CliError::usage(format!("{}:{number}:{column}: {message}\n  | {line}\n  | {caret}", self.path.display()))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn parse(&self, text: &str, offset: usize) -> Result<Table, CliError> {
        let table = DeTable::parse(text).map_err(|e| {
            let span = e.span().unwrap_or(0..0);
            self.error(&(span.start + offset..span.end + offset), e.message())
        })?;
        Ok(convert_table(table.get_ref(), offset))
    }
}

fn convert_table(table: &DeTable<'_>, offset: usize) -> Table {
    let shift = |span: Span| span.start + offset..span.end + offset;
    table
        .iter()
        .map(|(key, value)| {
            let span = shift(value.span());
            let node = Node { span, value: convert_value(value.get_ref(), offset) };
            (key.get_ref().to_string(), (shift(key.span()), node))
        })
        .collect()
}

fn convert_value(value: &DeValue<'_>, offset: usize) -> Value {
    match value {
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(v) => Value::Integer(v),
            Err(_) => Value::Other("an integer beyond 64 bits"),
        },
        DeValue::Float(f) => f.as_str().parse().map_or(Value::Other("a number that does not parse"), Value::Float),
        DeValue::String(s) => Value::String(s.to_string()),
        DeValue::Datetime(_) => Value::Other("a date"),
        DeValue::Table(t) => Value::Table(convert_table(t, offset)),
        DeValue::Array(a) => Value::Array(
            a.iter()
                .map(|v| Node {
                    span: v.span().start + offset..v.span().end + offset,
                    value: convert_value(v.get_ref(), offset),
                })
                .collect(),
        ),
    }
}

fn merge(into: &mut Table, from: Table) {
    for (key, (span, node)) in from {
        match (into.get_mut(&key), node.value) {
            (Some((_, Node { value: Value::Table(old), .. })), Value::Table(new)) => merge(old, new),
            (_, value) => {
                into.insert(key, (span, Node { span: node.span, value }));
            }
        }
    }
}

/// Reads a recipe file, applies `--set key=value` overrides (later ones win) and hands the root section to `read`,
/// after which every key must have been asked for.
///
/// # Errors
/// Exit code 2: the file cannot be read, is not TOML, an override is malformed, a key is unknown, or what `read` says.
pub fn load<T>(
    path: &Path,
    overrides: &[String],
    read: impl FnOnce(&mut Section) -> Result<T, CliError>,
) -> Result<T, CliError> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        CliError::usage(format!("{}: cannot read the recipe: {e}", path.display()))
            .with_hint("recipes that ship are in recipes/")
    })?;
    let mut source = Source { path: path.to_path_buf(), overrides_at: usize::MAX, text };
    let mut root = source.parse(&source.text, 0)?;
    source.text.push('\n');
    source.overrides_at = source.text.len();
    for text in overrides {
        let Some((key, value)) = text.split_once('=') else {
            return Err(CliError::usage(format!("--set {text}: expected key=value, got no `=`")));
        };
        let (key, value) = (key.trim(), value.trim());
        // A bare word is taken as a string, so that `--set quant.scheme=W4A16` needs no inner quotes.
        let plain = format!("{key} = {value}");
        let line = if DeTable::parse(&plain).is_ok() { plain } else { format!("{key} = {value:?}") };
        let start = source.text.len();
        source.text.push_str(&line);
        let table = source.parse(&line, start)?;
        source.text.push('\n');
        merge(&mut root, table);
    }
    let mut section = Section { source: &source, name: String::new(), span: 0..0, table: root, asked: Vec::new() };
    let out = read(&mut section)?;
    section.finish()?;
    Ok(out)
}

/// One table of the recipe. Each reading method takes a key out; [`Section::finish`] refuses what is left.
pub struct Section<'s> {
    source: &'s Source,
    name: String,
    span: Span,
    table: Table,
    asked: Vec<&'static str>,
}

impl<'s> Section<'s> {
    /// The file that is read.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// An error at this table.
    pub fn error(&self, message: impl std::fmt::Display) -> CliError {
        self.source.error(&self.span, message)
    }

    /// Whether a key is there, not taken yet.
    pub fn given(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Whether a key is this text, not taken yet.
    pub fn says(&self, key: &str, text: &str) -> bool {
        matches!(self.table.get(key), Some((_, Node { value: Value::String(v), .. })) if v == text)
    }

    /// The error of a key that stands where it must not, or not with its value: at its place, with what it says.
    pub fn refused(&mut self, key: &'static str, expected: &str) -> CliError {
        match self.take(key) {
            Some((_, node)) => self.wrong(key, &node, expected),
            None => self.missing(key, expected),
        }
    }

    fn take(&mut self, key: &'static str) -> Option<(Span, Node)> {
        self.asked.push(key);
        self.table.remove(key)
    }

    /// A key that must be there and is not: most likely it is there with a typo, and that is the place to show.
    fn missing(&self, key: &str, expected: &str) -> CliError {
        // Stricter than `nearest`: the keys left are not all unknown, some have only not been asked for yet.
        let typo = |word: &str| {
            let d = strsim::damerau_levenshtein(word, key);
            d <= 2 && 3 * d <= key.len()
        };
        if let Some((word, (span, _))) = self.table.iter().find(|(word, _)| typo(word)) {
            return self.unknown(word, span, &format!("did you mean `{key}`?"));
        }
        let table = if self.name.is_empty() { "the recipe".into() } else { format!("[{}]", self.name) };
        self.source.error(&self.span, format!("{table}: {key} is missing; expected {expected}"))
    }

    fn wrong(&self, key: &str, node: &Node, expected: &str) -> CliError {
        let got = match &node.value {
            Value::Bool(v) => v.to_string(),
            Value::Integer(v) => v.to_string(),
            Value::Float(v) => v.to_string(),
            Value::String(v) => format!("{v:?}"),
            Value::Array(_) => "a list".into(),
            Value::Table(_) => "a table".into(),
            Value::Other(what) => (*what).into(),
        };
        self.source.error(&node.span, format!("{key}: expected {expected}, got {got}"))
    }

    /// A sub-table, `None` when absent.
    pub fn optional_table(&mut self, key: &'static str) -> Result<Option<Section<'s>>, CliError> {
        let Some((key_span, node)) = self.take(key) else { return Ok(None) };
        match node.value {
            Value::Table(table) => {
                let name = if self.name.is_empty() { key.to_string() } else { format!("{}.{key}", self.name) };
                Ok(Some(Section { source: self.source, name, span: key_span, table, asked: Vec::new() }))
            }
            _ => Err(self.wrong(key, &node, "a table")),
        }
    }

    /// A sub-table that must be there.
    pub fn table(&mut self, key: &'static str) -> Result<Section<'s>, CliError> {
        self.optional_table(key)?.ok_or_else(|| self.missing(key, "a table"))
    }

    /// An integer in a range; `default` when absent, an error when absent without one.
    pub fn integer(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<i64>,
        default: Option<i64>,
    ) -> Result<i64, CliError> {
        let expected = match (*range.start(), *range.end()) {
            (lo, i64::MAX) => format!("an integer of at least {lo}"),
            (lo, hi) => format!("an integer from {lo} to {hi}"),
        };
        match self.take(key) {
            None => default.ok_or_else(|| self.missing(key, &expected)),
            Some((_, Node { value: Value::Integer(v), .. })) if range.contains(&v) => Ok(v),
            Some((_, node)) => Err(self.wrong(key, &node, &expected)),
        }
    }

    /// As [`Section::integer`], as `usize`.
    pub fn count(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<i64>,
        default: Option<i64>,
    ) -> Result<usize, CliError> {
        self.integer(key, range, default).map(|v| usize::try_from(v).unwrap_or(0))
    }

    /// A finite number in a range (an integer is one too).
    pub fn number(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<f64>,
        default: Option<f64>,
    ) -> Result<f64, CliError> {
        let expected = match (*range.start(), *range.end()) {
            (lo, f64::MAX) => format!("a number of at least {lo}"),
            (lo, hi) => format!("a number from {lo} to {hi}"),
        };
        let Some((_, node)) = self.take(key) else { return default.ok_or_else(|| self.missing(key, &expected)) };
        match node.value {
            Value::Float(v) if range.contains(&v) => Ok(v),
            Value::Integer(v) if range.contains(&(v as f64)) => Ok(v as f64),
            _ => Err(self.wrong(key, &node, &expected)),
        }
    }

    /// True or false.
    pub fn boolean(&mut self, key: &'static str, default: bool) -> Result<bool, CliError> {
        match self.take(key) {
            None => Ok(default),
            Some((_, Node { value: Value::Bool(v), .. })) => Ok(v),
            Some((_, node)) => Err(self.wrong(key, &node, "true or false")),
        }
    }

    /// A string, `None` when absent.
    pub fn optional_string(&mut self, key: &'static str) -> Result<Option<String>, CliError> {
        match self.take(key) {
            None => Ok(None),
            Some((_, Node { value: Value::String(v), .. })) => Ok(Some(v)),
            Some((_, node)) => Err(self.wrong(key, &node, "a string")),
        }
    }

    /// A string that must be there.
    pub fn string(&mut self, key: &'static str) -> Result<String, CliError> {
        self.optional_string(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// One of a list of names. Absent gives `default`; absent without one is an error.
    pub fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
        default: Option<T>,
    ) -> Result<T, CliError> {
        let names: Vec<_> = choices.iter().map(|(n, _)| *n).collect();
        let expected = format!("one of {}", names.join(", "));
        let Some((_, node)) = self.take(key) else { return default.ok_or_else(|| self.missing(key, &expected)) };
        if let Value::String(v) = &node.value
            && let Some((_, value)) = choices.iter().find(|(n, _)| n == v)
        {
            return Ok(*value);
        }
        let near = match &node.value {
            Value::String(v) => nearest(v, &names).map_or(String::new(), |n| format!(" (did you mean {n}?)")),
            _ => String::new(),
        };
        Err(self.wrong(key, &node, &format!("{expected}{near}")))
    }

    /// A list of strings; absent gives an empty list.
    pub fn strings(&mut self, key: &'static str) -> Result<Vec<String>, CliError> {
        let Some((_, node)) = self.take(key) else { return Ok(Vec::new()) };
        let Value::Array(items) = &node.value else { return Err(self.wrong(key, &node, "a list of strings")) };
        items
            .iter()
            .map(|item| match &item.value {
                Value::String(v) => Ok(v.clone()),
                _ => Err(self.wrong(key, item, "a string")),
            })
            .collect()
    }

    /// A list of integers in a range; absent gives `default`.
    pub fn integers(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<i64>,
        default: &[i64],
    ) -> Result<Vec<i64>, CliError> {
        let Some((_, node)) = self.take(key) else { return Ok(default.to_vec()) };
        let expected = format!("integers from {} to {}", range.start(), range.end());
        let Value::Array(items) = &node.value else {
            return Err(self.wrong(key, &node, &format!("a list of {expected}")));
        };
        if items.is_empty() {
            return Err(self.wrong(key, &node, &format!("a list of {expected} that is not empty")));
        }
        items
            .iter()
            .map(|item| match item.value {
                Value::Integer(v) if range.contains(&v) => Ok(v),
                _ => Err(self.wrong(key, item, &expected)),
            })
            .collect()
    }

    /// A path; a relative one starts at the recipe's folder. The file must exist.
    pub fn existing_path(&mut self, key: &'static str) -> Result<PathBuf, CliError> {
        let Some((_, node)) = self.take(key) else { return Err(self.missing(key, "a path")) };
        let Value::String(v) = &node.value else { return Err(self.wrong(key, &node, "a path")) };
        let path = self.path().parent().unwrap_or(Path::new("")).join(v);
        if !path.exists() {
            return Err(self
                .source
                .error(&node.span, format!("{key}: expected a file or folder that exists, got {}", path.display())));
        }
        Ok(path)
    }

    /// Refuses every key that was not asked for, naming the nearest that is known.
    pub fn finish(self) -> Result<(), CliError> {
        let Some((key, (span, _))) = self.table.iter().min_by_key(|(_, (span, _))| span.start) else { return Ok(()) };
        let near = nearest(key, &self.asked)
            .map_or_else(|| format!("expected one of {}", self.asked.join(", ")), |n| format!("did you mean `{n}`?"));
        Err(self.unknown(key, span, &near))
    }

    fn unknown(&self, key: &str, span: &Span, instead: &str) -> CliError {
        let table = if self.name.is_empty() { String::new() } else { format!(" in [{}]", self.name) };
        self.source.error(span, format!("unknown key `{key}`{table}; {instead}"))
    }
}

/// The name most like `word`, if one is near enough to be a typo of it.
fn nearest<'a>(word: &str, names: &[&'a str]) -> Option<&'a str> {
    names
        .iter()
        .map(|n| (strsim::damerau_levenshtein(word, n), *n))
        .filter(|(d, n)| *d <= n.len().max(word.len()) / 3 + 1)
        .min_by_key(|(d, _)| *d)
        .map(|(_, n)| n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, overrides: &[&str]) -> Result<(usize, f64, Vec<String>), CliError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.toml");
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        load(&path, &overrides, |root| {
            let mut quant = root.table("quant")?;
            let out = (
                quant.count("group_size", 1..=4096, Some(32))?,
                quant.number("rate", 0.0..=1.0, Some(0.5))?,
                quant.strings("ignore")?,
            );
            quant.finish()?;
            Ok(out)
        })
    }

    fn message(text: &str, overrides: &[&str]) -> String {
        let e = read(text, overrides).unwrap_err();
        assert_eq!(e.code(), 2);
        let text = e.to_string();
        text[text.find("r.toml").unwrap_or(0)..].to_string()
    }

    #[test]
    fn f082_a_typo_shows_line_column_caret_and_the_nearest_key() {
        assert_eq!(
            message("[quant]\n  grup_size = 32\n", &[]),
            "r.toml:2:3: unknown key `grup_size` in [quant]; did you mean `group_size`?\n  |   grup_size = 32\n  |   ^^^^^^^^^"
        );
        assert!(message("[quant\n", &[]).starts_with("r.toml:1:"));
        assert!(message("[quant]\nrate = 1\nrate = 2\n", &[]).starts_with("r.toml:3:1: duplicate key"));
        assert_eq!(
            message("x = 1\n[quannt]\n", &[]),
            "r.toml:2:2: unknown key `quannt`; did you mean `quant`?\n  | [quannt]\n  |  ^^^^^^"
        );
        assert!(message("[quantiles]\n", &[]).contains("quant is missing"));
    }

    #[test]
    fn f083_f087_values_out_of_range_or_of_another_type_name_both_sides() {
        for (line, want) in [
            ("group_size = 0", "group_size: expected an integer from 1 to 4096, got 0"),
            ("group_size = -2", "got -2"),
            ("group_size = 3.5", "got 3.5"),
            ("group_size = \"four\"", "got \"four\""),
            ("group_size = 1_000_000_000", "got 1000000000"),
            ("group_size = 99999999999999999999", "an integer beyond 64 bits"),
            ("rate = \"1e-4\"", "rate: expected a number from 0 to 1, got \"1e-4\""),
            ("rate = nan", "got NaN"),
            ("rate = -0.1", "got -0.1"),
            ("rate = 50", "got 50"),
            ("ignore = \"lm_head\"", "ignore: expected a list of strings"),
        ] {
            let text = message(&format!("[quant]\n{line}\n"), &[]);
            assert!(text.starts_with("r.toml:2:") && text.contains(want), "{line}: {text}");
        }
    }

    #[test]
    fn overrides_win_and_are_named_in_errors() {
        let ok = read("[quant]\ngroup_size = 32\n", &["quant.group_size=64", "quant.rate = 0.25"]).unwrap();
        assert_eq!((ok.0, ok.1), (64, 0.25));
        assert_eq!(
            message("[quant]\n", &["quant.rate=2"]),
            "--set quant.rate = 2: rate: expected a number from 0 to 1, got 2"
        );
        assert!(message("[quant]\n", &["quant.rat=0.1"]).contains("did you mean `rate`?"));
        assert!(message("[quant]\n", &["quant.rate"]).contains("expected key=value"));
        assert!(message("[quant]\n", &["quant.rate=abc"]).contains("got \"abc\""));
    }
}
