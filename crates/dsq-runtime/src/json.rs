//! JSON as chat templates see it: objects keep their order, and text comes out as Python's `json.dumps` and `str` write it,
//! because templates were written for those. Not for files (see `serde_json`), whose order does not matter.

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

/// A JSON value whose objects keep the order in which they were written.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    String(String),
    /// An array.
    List(Vec<Json>),
    /// An object; no name stands twice in one that was read.
    Map(Vec<(String, Json)>),
}

impl Json {
    /// The value under `name` of an object.
    pub fn get(&self, name: &str) -> Option<&Json> {
        let Self::Map(fields) = self else { return None };
        fields.iter().find(|(k, _)| k == name).map(|(_, v)| v)
    }

    /// The text, of a text.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    /// What kind of value it is, for messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::String(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }

    /// `self` with `f` applied to every text in it, names of objects too.
    pub(crate) fn map_texts(&self, f: &dyn Fn(&str) -> String) -> Self {
        match self {
            Self::String(text) => Self::String(f(text)),
            Self::List(list) => Self::List(list.iter().map(|v| v.map_texts(f)).collect()),
            Self::Map(fields) => Self::Map(fields.iter().map(|(k, v)| (f(k), v.map_texts(f))).collect()),
            other => other.clone(),
        }
    }

    /// The value as a template's variable.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(b) => Value::from(*b),
            Self::Number(n) => Value::from_serialize(n),
            Self::String(text) => Value::from(text.as_str()),
            Self::List(list) => Value::from(list.iter().map(Self::to_value).collect::<Vec<_>>()),
            Self::Map(fields) => {
                Value::from_object(Ordered(fields.iter().map(|(k, v)| (k.clone(), v.to_value())).collect()))
            }
        }
    }
}

/// An object as a template sees it.
#[derive(Debug)]
struct Ordered(Vec<(String, Value)>);

impl Object for Ordered {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(k, _)| Value::from(k.as_str())).collect())
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Json;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Json, E> {
                Ok(Json::Bool(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Json, E> {
                Ok(Json::Number(v.into()))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Json, E> {
                Ok(Json::Number(v.into()))
            }
            fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Json, E> {
                Number::from_f64(v).map(Json::Number).ok_or_else(|| E::custom("expected a finite number"))
            }
            fn visit_str<E>(self, v: &str) -> Result<Json, E> {
                Ok(Json::String(v.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(value) = seq.next_element()? {
                    list.push(value);
                }
                Ok(Json::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let (mut fields, mut names) = (Vec::new(), HashSet::new());
                while let Some((name, value)) = map.next_entry::<String, Json>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name:?} stands twice in one object")));
                    }
                    fields.push((name, value));
                }
                Ok(Json::Map(fields))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Deepest nesting that is written, so that a template cannot use up the stack.
const DEEPEST: usize = 200;
/// Longest text that is written, in bytes: a list that holds itself twice, sixty times over, would have no end.
const LONGEST: usize = 16 << 20;

/// How a value is written.
pub(crate) enum Style<'a> {
    /// As `json.dumps(ensure_ascii=False)`; spaces of an indented line, and what stands after an element and a name.
    Dumps { indent: Option<usize>, item: &'a str, name: &'a str },
    /// As `str` writes a list or a dict.
    Str,
}

impl Style<'_> {
    /// Appends `value`.
    ///
    /// # Errors
    /// An error of the template for what has no such form (undefined), and for values that are nested too deep.
    pub(crate) fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let fail = |problem: String| Err(Error::new(ErrorKind::InvalidOperation, problem));
        if depth > DEEPEST {
            return fail(format!("expected values nested at most {DEEPEST} deep, got more"));
        }
        if out.len() > LONGEST {
            return fail(format!("expected a value of at most {LONGEST} bytes when written, got more"));
        }
        let json = matches!(self, Self::Dumps { .. });
        match value.kind() {
            ValueKind::None => out.push_str(if json { "null" } else { "None" }),
            ValueKind::Bool => out.push_str(match (json, value.is_true()) {
                (true, true) => "true",
                (true, false) => "false",
                (false, true) => "True",
                (false, false) => "False",
            }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                out.push_str(&if json { serde_json::Value::from(text).to_string() } else { repr(text) });
            }
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut count = 0;
                for element in value.try_iter()? {
                    self.before(count, depth, out);
                    self.write(&element, depth + 1, out)?;
                    count += 1;
                }
                self.close(count, depth, ']', out);
            }
            ValueKind::Map => {
                out.push('{');
                let mut count = 0;
                for key in value.try_iter()? {
                    self.before(count, depth, out);
                    self.write(&key, depth + 1, out)?;
                    out.push_str(if let Self::Dumps { name, .. } = self { name } else { ": " });
                    self.write(&value.get_item(&key)?, depth + 1, out)?;
                    count += 1;
                }
                self.close(count, depth, '}', out);
            }
            kind => return fail(format!("expected a value that JSON can hold, got {kind}")),
        }
        Ok(())
    }

    fn before(&self, count: usize, depth: usize, out: &mut String) {
        let (indent, item) = match self {
            Self::Dumps { indent, item, .. } => (*indent, *item),
            Self::Str => (None, ", "),
        };
        if count > 0 {
            out.push_str(item);
        }
        if let Some(n) = indent {
            line(n * (depth + 1), out);
        }
    }

    fn close(&self, count: usize, depth: usize, with: char, out: &mut String) {
        if let Self::Dumps { indent: Some(n), .. } = self
            && count > 0
        {
            line(n * depth, out);
        }
        out.push(with);
    }
}

fn line(spaces: usize, out: &mut String) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', spaces));
}

/// A number as Python writes it: an integer in digits, a float with a point or an exponent (below 1e-4, from 1e16 on).
fn number(value: &Value) -> String {
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if value.is_integer() {
        return value.to_string();
    }
    if !float.is_finite() {
        return if float.is_nan() {
            "NaN"
        } else if float > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => format!("{float:?}"),
        e => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
    }
}

/// A text as Python's `repr` writes it.
fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => drop(write!(out, "\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"z": 1, "a": [true, null, {"k": "<é'\"\n\u0001>"}, [], {}], "n": [1.0, -0.0, 1e22, 1.5e-7, 0.0001, 1e15, 18446744073709551615, -3]}"#;

    fn written(style: Style<'_>) -> String {
        let value: Json = serde_json::from_str(TEXT).unwrap();
        let mut out = String::new();
        style.write(&value.to_value(), 0, &mut out).unwrap();
        out
    }

    /// The expected texts are what Python 3.11 prints of `json.loads(TEXT)`.
    #[test]
    fn values_are_written_as_python_writes_them() {
        assert_eq!(
            written(Style::Dumps { indent: None, item: ", ", name: ": " }),
            r#"{"z": 1, "a": [true, null, {"k": "<é'\"\n\u0001>"}, [], {}], "n": [1.0, -0.0, 1e+22, 1.5e-07, 0.0001, 1000000000000000.0, 18446744073709551615, -3]}"#
        );
        assert_eq!(
            written(Style::Str),
            r#"{'z': 1, 'a': [True, None, {'k': '<é\'"\n\x01>'}, [], {}], 'n': [1.0, -0.0, 1e+22, 1.5e-07, 0.0001, 1000000000000000.0, 18446744073709551615, -3]}"#
        );
        let indented = written(Style::Dumps { indent: Some(2), item: ",", name: ": " });
        assert!(
            indented.starts_with("{\n  \"z\": 1,\n  \"a\": [\n    true,\n    null,\n    {\n      \"k\""),
            "{indented}"
        );
        assert!(indented.contains("    [],\n    {}\n  ],\n") && indented.ends_with("    -3\n  ]\n}"), "{indented}");
    }

    #[test]
    fn what_json_cannot_hold_or_is_too_deep_is_an_error() {
        let plain = Style::Dumps { indent: None, item: ", ", name: ": " };
        assert!(plain.write(&Value::UNDEFINED, 0, &mut String::new()).is_err());
        let mut deep = Json::Null;
        for _ in 0..300 {
            deep = Json::List(vec![deep]);
        }
        assert!(plain.write(&deep.to_value(), 0, &mut String::new()).is_err());
        let e = serde_json::from_str::<Json>(r#"{"a": 1, "a": 2}"#).unwrap_err();
        assert!(e.to_string().contains("stands twice"), "{e}");
    }
}
