//! Bounds on what a chat template may do: a hostile one is an error, never a stack overflow, a hang in one step or gigabytes.
//! Not a sandbox against files or code (a template reaches neither), and no limit on time but the engine's fuel.
//!
//! minijinja bounds the nesting of source, calls and loops, but not of values: a namespace put into itself is printed without
//! end, and `ns.a = [ns.a]` in a loop makes a list that overflows the stack when it is dropped. So the compiled template is
//! rewritten before it runs: behind every instruction that makes a value stands a call of [`CHECK`], which refuses values too
//! deep or too large and turns lazy sequences (slices, sums, ranges: each holds the one before it) into plain lists. Values
//! grow only through such instructions, each from values checked before, so no value is ever deeper than [`DEEPEST`] + 1.
//! A namespace may be passed to macros, but may stand in no list, map or namespace, so nothing contains itself.

use crate::{Json, RuntimeError};
use minijinja::machinery::{Instruction, Instructions, Token, Vm, get_compiled_template, make_string_output, tokenize};
use minijinja::value::{Object, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters, functions};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Longest source, in bytes; the longest known real one has 30 thousand.
const LONGEST_SOURCE: usize = 1 << 18;
/// Most tokens between `{{` and `}}` or `{%` and `%}`: chains such as `a+a+a` nest as deep as they are long.
const MOST_TOKENS: usize = 1024;
/// Most `elif` in a template: each nests in the one before it.
const MOST_ELIF: usize = 256;
/// Deepest nesting of lists and maps in a value.
const DEEPEST: usize = 64;
/// Most items in a value, those of nested lists and maps included, counted once for every place where they stand.
const MOST_ITEMS: usize = 200_000;
/// Most text in a value, in bytes, counted in the same way.
const MOST_TEXT: usize = 16 << 20;
/// Most bytes that a rendering may make, its intermediate values included.
const MOST_MADE: usize = 256 << 20;
/// Most items that a rendering may look at while it checks values.
const MOST_CHECKED: usize = 40_000_000;
/// Largest number that a filter or a method takes as a width or a count.
const WIDEST: u64 = 10_000;
/// Largest factor, limit of a range and step of a slice: sums and products of two stay inside 64 bits.
const LARGEST: u64 = 1_000_000_000_000;

/// Checks the value on top of the stack.
const CHECK: &str = "dsq_check";
/// Checks what is about to be written.
const WRITE: &str = "dsq_write";
/// Checks a value about to be put into a namespace.
const STORE: &str = "dsq_store";
/// Checks a factor or a step.
const NUMBER: &str = "dsq_number";
/// The number of a filter local that is looked up each time.
const NO_LOCAL: u8 = !0;

/// Adds a template under the name `chat`, with the filters that [`render`] needs.
///
/// # Errors
/// [`RuntimeError::Tokenizer`] naming `file`, the line and what is wrong: a syntax error or a construct that has no place
/// in a chat template.
pub(crate) fn add(environment: &mut Environment<'static>, source: String, file: &str) -> Result<(), RuntimeError> {
    let fail = |line: usize, problem: String| RuntimeError::Tokenizer {
        file: file.into(),
        part: format!("chat template, line {line}"),
        problem,
    };
    check_source(&source).map_err(|(line, problem)| fail(line, problem))?;
    environment.add_filter(CHECK, |state: &State, value: Value| check(state, value));
    environment.add_filter(STORE, store);
    environment.add_filter(NUMBER, number);
    environment.add_filter(WRITE, |state: &State, value: Value| {
        let text = inspect(state, &value)?.text;
        Made::of(state).add_bytes(text)?;
        Ok::<_, Error>(value)
    });
    environment.remove_global("debug"); // It prints frames and closures, which are not checked.
    for (name, inner) in [
        ("batch", Value::from_function(filters::batch)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("replace", Value::from_function(filters::replace)),
        ("round", Value::from_function(filters::round)),
        ("slice", Value::from_function(filters::slice)),
        ("split", Value::from_function(filters::split)),
    ] {
        environment.add_filter(name, move |state: &State, arguments: Rest<Value>| {
            check_call(state, name, &arguments)?;
            inner.call(state, &arguments)
        });
    }
    environment.add_function("range", |lower: isize, upper: Option<isize>, step: Option<isize>| {
        for limit in [Some(lower), upper, step].into_iter().flatten() {
            number(Value::from(limit as i64))?;
        }
        functions::range(lower, upper, step)
    });
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        check_call(state, method, &all)?;
        if let ("count", Some(text), [what]) = (method, value.as_str(), arguments)
            && what.as_str() == Some("")
        {
            return Ok(Value::from(text.chars().count() + 1)); // As Python; the library's own never ends.
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
    });
    environment.add_template_owned("chat", source).map_err(|e| fail(e.line().unwrap_or(0), e.to_string()))?;
    let template = environment.get_template("chat").map_err(|e| fail(0, e.to_string()))?;
    let compiled = get_compiled_template(&template);
    for code in std::iter::once(&compiled.instructions).chain(compiled.blocks.values()) {
        guarded(code).map_err(|(line, problem)| fail(line, problem))?;
    }
    Ok(())
}

/// The text of the template that [`add`] added, for the variables in `values` (a map).
///
/// # Errors
/// What the template refuses, and what goes beyond the bounds of this module.
pub(crate) fn render(environment: &Environment<'_>, values: Value) -> Result<String, Error> {
    let template = environment.get_template("chat")?;
    let compiled = get_compiled_template(&template);
    let guarded = |code| guarded(code).map_err(|(_, problem)| refused(problem));
    let main = guarded(&compiled.instructions)?;
    let blocks: BTreeMap<&str, Instructions<'_>> =
        compiled.blocks.iter().map(|(name, code)| Ok((*name, guarded(code)?))).collect::<Result<_, Error>>()?;
    let mut text = String::new();
    Vm::new(environment).eval(&main, values, &blocks, &mut make_string_output(&mut text), AutoEscape::None)?;
    Ok(text)
}

fn refused(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Bounds the nesting of the source and the constants that the compiler computes, before it is compiled: both compiler and
/// the drop of its tree recurse.
fn check_source(source: &str) -> Result<(), (usize, String)> {
    if source.len() > LONGEST_SOURCE {
        return Err((1, format!("expected at most {LONGEST_SOURCE} bytes, got {}", source.len())));
    }
    let (mut tokens, mut elif, mut factors, mut texts, mut large) = (0, 0, 0, false, false);
    // An error here is found again, and told, by the compiler.
    for (token, span) in tokenize(source, false, Default::default(), Default::default()).map_while(Result::ok) {
        let line = usize::from(span.start_line);
        tokens += 1;
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => {
                (tokens, factors, texts, large) = (0, 0, false, false);
            }
            Token::Ident("elif") => elif += 1,
            Token::Mul => factors += 1,
            Token::Pow => factors += 2,
            Token::Str(_) | Token::String(_) => texts = true,
            Token::Int(n) => large |= n > 1000,
            Token::Int128(_) | Token::Float(_) => large = true,
            _ => {}
        }
        if tokens > MOST_TOKENS {
            return Err((line, format!("expected at most {MOST_TOKENS} tokens in one tag, got more")));
        }
        if elif > MOST_ELIF {
            return Err((line, format!("expected at most {MOST_ELIF} elif, got more")));
        }
        // `'x' * 100000000` is computed when the template is compiled, at every place where it stands.
        if texts && (factors > 1 || factors > 0 && large) {
            return Err((line, "expected texts to be repeated at most 1000 times, got a larger product".into()));
        }
    }
    Ok(())
}

/// The instructions with the checks put between them.
fn guarded<'s>(code: &Instructions<'s>) -> Result<Instructions<'s>, (usize, String)> {
    use Instruction as I;
    let apply = |name| I::ApplyFilter(name, Some(1), NO_LOCAL);
    let count = code.len() as u32;
    let mut rows = Vec::with_capacity(code.len());
    for (at, instruction) in (0..count).filter_map(|at| Some((at, code.get(at)?))) {
        let line = code.get_line(at).unwrap_or(0);
        let (before, after) = match instruction {
            I::EmitRaw(text) if text.len() > 32 => {
                (vec![I::LoadConst(Value::from(*text)), apply(WRITE), I::DiscardTop], vec![])
            }
            I::Emit => (vec![apply(WRITE)], vec![]),
            I::SetAttr(_) => (vec![I::Swap, apply(STORE), I::Swap], vec![]),
            I::Slice => (vec![apply(NUMBER)], vec![apply(CHECK)]),
            I::Mul => (vec![apply(NUMBER), I::Swap, apply(NUMBER), I::Swap], vec![apply(CHECK)]),
            // loop.cycle() without arguments divides by their number.
            I::CallMethod("cycle", Some(1)) => return Err((line, "expected arguments of cycle(), got none".into())),
            I::BuildMap(_)
            | I::BuildList(_)
            | I::Add
            | I::StringConcat
            | I::ApplyFilter(..)
            | I::EndCapture
            | I::CallFunction(..)
            | I::CallMethod(..)
            | I::CallObject(_) => (vec![], vec![apply(CHECK)]),
            I::Include(_) | I::LoadBlocks => {
                return Err((line, "expected one template, got include, import or extends".into()));
            }
            I::UnpackLists(_) | I::MergeKwargs(_) => {
                return Err((line, "expected plain arguments, got * or **".into()));
            }
            I::PushAutoEscape => return Err((line, "expected no escaping, got autoescape".into())),
            _ => (vec![], vec![]),
        };
        rows.push((line, before, instruction.clone(), after));
    }
    // Where the group of each instruction starts; a jump to it goes through the checks before it.
    let mut starts = Vec::with_capacity(rows.len() + 1);
    let mut start = 0u32;
    for (_, before, _, after) in &rows {
        starts.push(start);
        start += (before.len() + after.len()) as u32 + 1;
    }
    starts.push(start);
    let moved = |to: u32| starts.get(to as usize).copied().unwrap_or(start);
    let mut out = Instructions::new(code.name(), code.source());
    for (line, before, mut instruction, after) in rows {
        match &mut instruction {
            I::Iterate(to)
            | I::Jump(to)
            | I::JumpIfFalse(to)
            | I::JumpIfFalseOrPop(to)
            | I::JumpIfTrueOrPop(to)
            | I::BuildMacro(_, to, _) => *to = moved(*to),
            _ => {}
        }
        for i in before.into_iter().chain([instruction]).chain(after) {
            out.add_with_line(i, line.try_into().unwrap_or(u16::MAX));
        }
    }
    Ok(out)
}

/// What a rendering has made and checked so far.
#[derive(Debug, Default)]
struct Made {
    bytes: AtomicUsize,
    items: AtomicUsize,
}

impl Object for Made {}

impl Made {
    fn of(state: &State) -> Arc<Self> {
        state.get_or_set_temp_object("dsq_made", Self::default)
    }

    fn add_bytes(&self, bytes: usize) -> Result<(), Error> {
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST_MADE {
            return Err(refused(format!("expected values of at most {MOST_MADE} bytes together, got more")));
        }
        Ok(())
    }

    fn add_items(&self, items: usize) -> Result<(), Error> {
        if self.items.fetch_add(items, Ordering::Relaxed) + items > MOST_CHECKED {
            return Err(refused(format!("expected lists of at most {MOST_CHECKED} items together, got more")));
        }
        Ok(())
    }
}

/// What [`inspect`] found.
#[derive(Default)]
struct Found {
    /// Items, those of nested lists and maps included.
    items: usize,
    /// Bytes of text, with a few for every item that is none.
    text: usize,
    /// The value with plain lists instead of lazy ones, where it has such.
    plain: Option<Value>,
}

/// Whether a value has nothing inside: a text, a number, none, undefined, bytes.
fn is_scalar(value: &Value) -> bool {
    value.as_object().is_none()
}

/// Whether a map is one of the plain maps of the engine or an object of the conversation, not a namespace, macro, loop or
/// module, which hide values.
fn is_plain_map(value: &Value) -> bool {
    static NAMES: OnceLock<[Option<&str>; 2]> = OnceLock::new();
    let names =
        NAMES.get_or_init(|| [type_name(&Value::from_iter([("a", 1)])), type_name(&Json::Map(vec![]).to_value())]);
    type_name(value).is_some_and(|name| names.contains(&Some(name)))
}

/// Whether a value is a namespace.
fn is_namespace(value: &Value) -> bool {
    static NAME: OnceLock<Option<&str>> = OnceLock::new();
    let name = NAME.get_or_init(|| functions::namespace(None).ok().and_then(|v| type_name(&v)));
    name.is_some() && type_name(value) == *name
}

/// The Rust type of an object of the engine; that of a namespace is private to it.
fn type_name(value: &Value) -> Option<&'static str> {
    value.as_object().map(|object| object.type_name())
}

/// Walks through a value, within the bounds.
fn walk(value: &Value, depth: usize, found: &mut Found) -> Result<Option<Value>, Error> {
    found.items += 1;
    found.text += match (value.as_str(), value.as_bytes()) {
        (Some(text), _) => text.len(),
        (_, Some(bytes)) => bytes.len(),
        _ => 8,
    };
    if found.items > MOST_ITEMS {
        return Err(refused(format!("expected at most {MOST_ITEMS} items in a list or map, got more")));
    }
    if found.text > MOST_TEXT {
        return Err(refused(format!("expected a value of at most {MOST_TEXT} bytes, got more")));
    }
    let Some(object) = value.as_object() else { return Ok(None) };
    if depth >= DEEPEST {
        return Err(refused(format!("expected lists and maps nested at most {DEEPEST} deep, got more")));
    }
    match value.kind() {
        kind @ (ValueKind::Seq | ValueKind::Iterable) => {
            let lazy = kind == ValueKind::Iterable;
            let mut items = Vec::new();
            let mut changed = lazy;
            for item in object.try_iter().into_iter().flatten() {
                let plain = walk(&item, depth + 1, found)?;
                changed |= plain.is_some();
                items.push(plain.unwrap_or(item));
            }
            Ok(changed.then(|| Value::from(items)))
        }
        ValueKind::Map if is_plain_map(value) => {
            let mut pairs = Vec::new();
            let mut changed = false;
            for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                let (k, v) = (walk(&key, depth + 1, found)?, walk(&item, depth + 1, found)?);
                changed |= k.is_some() || v.is_some();
                pairs.push((k.unwrap_or(key), v.unwrap_or(item)));
            }
            Ok(changed.then(|| pairs.into_iter().collect()))
        }
        _ if is_namespace(value) => Err(refused("expected no namespace inside a list, map or namespace, got one")),
        kind => Err(refused(format!("expected texts, numbers, lists and maps in a value, got a {kind} of the engine"))),
    }
}

/// The size of a value; namespaces, macros and loops themselves count as nothing, their text is short.
fn inspect(state: &State, value: &Value) -> Result<Found, Error> {
    let mut found = Found::default();
    if is_namespace(value) {
        for (_, item) in value.as_object().and_then(|o| o.try_iter_pairs()).into_iter().flatten() {
            walk(&item, 1, &mut found)?;
        }
    } else if is_scalar(value) || is_plain_map(value) || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        found.plain = walk(value, 0, &mut found)?;
    }
    if found.items > 1 {
        Made::of(state).add_items(found.items)?;
    }
    Ok(found)
}

/// The value, with plain lists instead of lazy ones, counted.
fn check(state: &State, value: Value) -> Result<Value, Error> {
    if is_scalar(&value) && value.as_str().is_none_or(|text| text.len() < 24) {
        return Ok(value);
    }
    let found = inspect(state, &value)?;
    // Items are shared with the values that they come from; a text or a list is new.
    Made::of(state).add_bytes(value.as_str().map_or_else(|| 24 * value.len().unwrap_or(0), str::len))?;
    Ok(found.plain.unwrap_or(value))
}

/// A value for a namespace: texts, numbers, lists and maps.
fn store(state: &State, value: Value) -> Result<Value, Error> {
    if is_scalar(&value) {
        return Ok(value);
    }
    let mut found = Found::default();
    let plain = walk(&value, 0, &mut found)?;
    Made::of(state).add_items(found.items)?;
    Ok(plain.unwrap_or(value))
}

/// A value that is no number, or one within [`LARGEST`].
fn number(value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Number
        && value.as_i64().is_none_or(|n| n.unsigned_abs() > LARGEST)
        && !is_fraction(&value)
    {
        return Err(refused(format!("expected a number of at most {LARGEST}, got {value}")));
    }
    Ok(value)
}

/// Whether a number has a fraction, or is no finite one: neither is a count.
fn is_fraction(value: &Value) -> bool {
    f64::try_from(value.clone()).is_ok_and(|x| x.fract() != 0.0 || !x.is_finite())
}

/// Bounds what a filter or method can make of its arguments (the first is the value itself): their counts and widths, and
/// for those that insert one text at many places of another, the product.
fn check_call(state: &State, name: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut all: Vec<Value> = Vec::new();
    for argument in arguments {
        match argument.as_object() {
            Some(object) if argument.is_kwargs() => {
                all.extend(object.try_iter_pairs().into_iter().flatten().map(|p| p.1))
            }
            _ => all.push(argument.clone()),
        }
    }
    // What a map is asked for and what is formatted may be any number.
    if !matches!(name, "get" | "format") {
        for value in all.iter().skip(1).filter(|v| v.kind() == ValueKind::Number) {
            if value.as_i64().is_none_or(|n| n.unsigned_abs() > WIDEST) && !is_fraction(value) {
                return Err(refused(format!("expected numbers of at most {WIDEST} for {name}, got {value}")));
            }
        }
    }
    let Some(first) = all.first() else { return Ok(()) };
    let text = first.as_str().unwrap_or_default();
    let width = all.iter().skip(1).filter_map(Value::as_i64).max().unwrap_or(0).unsigned_abs() as usize;
    let made = match name {
        "replace" => {
            let (old, new) = (all.get(1).and_then(Value::as_str), all.get(2).and_then(Value::as_str));
            let Some((old, new)) = old.zip(new) else { return Ok(()) };
            let places = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() };
            text.len() + places.saturating_mul(new.len())
        }
        // A filter joins the first by the second, a method the second by the first.
        "join" => {
            let between = all.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
            let mut sum = 0;
            for value in all.iter().filter(|v| !is_scalar(v)) {
                let found = inspect(state, value)?;
                sum += found.text.saturating_add(found.items.saturating_mul(between));
            }
            sum
        }
        "indent" => text.len() + (text.lines().count() + 1).saturating_mul(width),
        "batch" | "slice" => inspect(state, first)?.items.saturating_add(width).saturating_mul(8),
        "format" => {
            if text.as_bytes().split(|c| !c.is_ascii_digit()).any(|digits| digits.len() > 4) {
                return Err(refused("expected widths of at most 9999 in a format, got more"));
            }
            let mut longest = 9999;
            for value in all.iter().skip(1) {
                longest = longest.max(inspect(state, value)?.text);
            }
            text.len() + text.matches(['%', '{']).count().saturating_mul(longest)
        }
        _ => 0,
    };
    if made > MOST_TEXT {
        return Err(refused(format!("expected {name} to make at most {MOST_TEXT} bytes, got {made}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
