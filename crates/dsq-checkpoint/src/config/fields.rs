//! Typed access to the keys of a JSON object, with errors that name the key and both values, and a record of the
//! keys that were asked for, so that the rest can be refused by name.

use crate::CheckpointError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;

/// Largest count or size in a config: more than any model has, and small enough that products of three fit in u128
/// and of two in u64.
const MAX_SIZE: u64 = 1 << 30;

/// The keys of one JSON object.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    file: &'a Path,
    prefix: String,
    asked: RefCell<HashSet<&'static str>>,
}

impl<'a> Fields<'a> {
    /// The keys of `value`, which stands at `prefix` ("" at the top).
    pub(crate) fn new(value: &'a Value, file: &'a Path, prefix: &str) -> Result<Self, CheckpointError> {
        let Value::Object(map) = value else {
            return Err(CheckpointError::invalid(file, prefix, format!("expected a JSON object, got {}", show(value))));
        };
        Ok(Self { map, file, prefix: prefix.to_owned(), asked: RefCell::default() })
    }

    /// The name of a key with the place where it stands.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    /// An error about a key.
    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::invalid(self.file, self.path(key), problem)
    }

    /// The value of a key; `null` counts as absent.
    pub(crate) fn get(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there, `null` included.
    pub(crate) fn has(&self, key: &'static str) -> bool {
        self.map.contains_key(key)
    }

    fn expected<T>(&self, key: &str, what: &str, got: &Value) -> Result<T, CheckpointError> {
        Err(self.error(key, format!("expected {what}, got {}", show(got))))
    }

    /// A required value.
    pub(crate) fn required<T>(
        &self,
        key: &'static str,
        found: Result<Option<T>, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        found?.ok_or_else(|| {
            let got = if self.has(key) { "null" } else { "nothing (the key is missing)" };
            self.error(key, format!("expected a value, got {got}"))
        })
    }

    /// An integer in `range`; `32.0` counts as 32.
    pub(crate) fn integer(
        &self,
        key: &'static str,
        range: std::ops::RangeInclusive<i64>,
    ) -> Result<Option<i64>, CheckpointError> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match integer(v) {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => self.expected(key, &format!("an integer from {} to {}", range.start(), range.end()), v),
        }
    }

    /// A size: an integer from 1 to 2^30.
    pub(crate) fn size(&self, key: &'static str) -> Result<Option<usize>, CheckpointError> {
        Ok(self.integer(key, 1..=MAX_SIZE as i64)?.map(|n| n as usize))
    }

    /// A number.
    pub(crate) fn number(&self, key: &'static str) -> Result<Option<f64>, CheckpointError> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => self.expected(key, "a number", v),
        }
    }

    /// A boolean.
    pub(crate) fn boolean(&self, key: &'static str) -> Result<Option<bool>, CheckpointError> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_bool().map_or_else(|| self.expected(key, "true or false", v), |b| Ok(Some(b)))
    }

    /// A string.
    pub(crate) fn string(&self, key: &'static str) -> Result<Option<&'a str>, CheckpointError> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_str().map_or_else(|| self.expected(key, "a string", v), |s| Ok(Some(s)))
    }

    /// A list.
    pub(crate) fn list(&self, key: &'static str) -> Result<Option<&'a [Value]>, CheckpointError> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_array().map_or_else(|| self.expected(key, "a list", v), |a| Ok(Some(a.as_slice())))
    }

    /// A list of strings.
    pub(crate) fn strings(&self, key: &'static str) -> Result<Option<Vec<String>>, CheckpointError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        list.iter()
            .map(|v| v.as_str().map_or_else(|| self.expected(key, "a list of strings", v), |s| Ok(s.to_owned())))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Token ids below `vocab`: one integer or a list of them; `null` and absence give an empty list.
    pub(crate) fn token_ids(&self, key: &'static str, vocab: usize) -> Result<Vec<u32>, CheckpointError> {
        let one = |v: &Value| match integer(v) {
            Some(n) if n >= 0 && (n as u64) < vocab as u64 => Ok(n as u32),
            _ => self.expected(key, &format!("token ids below vocab_size = {vocab}"), v),
        };
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(v) => Ok(vec![one(v)?]),
        }
    }

    /// Accepts a key only when it is absent, `null` or has this value: dsq implements nothing else.
    pub(crate) fn only(&self, key: &'static str, allowed: &Value, why: &str) -> Result<(), CheckpointError> {
        match self.get(key) {
            Some(v) if v != allowed => self.expected(key, &format!("{allowed} ({why})"), v),
            _ => Ok(()),
        }
    }

    /// Refuses the first key that was neither asked for nor is in `ignored`.
    pub(crate) fn refuse_the_rest(&self, ignored: &[&str]) -> Result<(), CheckpointError> {
        let asked = self.asked.borrow();
        for (key, value) in self.map {
            if !asked.contains(key.as_str()) && !ignored.contains(&key.as_str()) {
                let problem =
                    format!("dsq does not know this key; expected only keys that it honours, got {}", show(value));
                return Err(self
                    .error(key, problem)
                    .with_hint("remove the key if it does not change what the model computes"));
            }
        }
        Ok(())
    }
}

fn integer(v: &Value) -> Option<i64> {
    v.as_i64().or_else(|| v.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9.0e15).map(|x| x as i64))
}

/// A value as it appears in a message: short, and with strings in quotes.
pub(crate) fn show(v: &Value) -> String {
    let text = v.to_string();
    if text.chars().count() <= 80 { text } else { format!("{}...", text.chars().take(80).collect::<String>()) }
}
