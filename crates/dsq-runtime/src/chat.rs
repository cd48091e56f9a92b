//! Chat templates: messages to token ids, by the Jinja template that a model brings. Special tokens inside a message are
//! text, and the result has one BOS, not two. Runs no code of the model but its template, with bounded fuel.

use crate::{RuntimeError, Specials, TextTokenizer};
use dsq_checkpoint::Checkpoint;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Steps that a template may take; a loop without end stops here.
const FUEL: u64 = 2_000_000;
/// Longest text that a template may make, in bytes.
const LONGEST: usize = 16 << 20;
/// A noncharacter of Unicode, put inside special texts of a message so that they are told from the template's own.
const MARK: char = '\u{fdd0}';

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
    file: String,
}

impl ChatTemplate {
    /// The template of a model, `None` when it has none.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`] naming the line of a syntax error.
    pub fn of_model(model: &Checkpoint, tokenizer: &TextTokenizer) -> Result<Option<Self>, RuntimeError> {
        let Some(source) = model.chat_template()? else { return Ok(None) };
        let text_of = |id: Option<u32>| {
            let id = id?;
            tokenizer.specials().iter().find(|(_, i)| *i == id).map(|(t, _)| t.clone())
        };
        let (bos, eos) = match model.config() {
            dsq_checkpoint::ModelConfig::Llama(c) => (c.bos_token_id, c.eos_token_ids.first().copied()),
            _ => (None, None),
        };
        let file = model.path().display().to_string();
        Self::new(source, text_of(bos), text_of(eos), &file).map(Some)
    }

    /// Compiles a template; `bos` and `eos` are the texts of those tokens, `file` is for messages.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`] naming the line of a syntax error.
    pub fn new(source: String, bos: Option<String>, eos: Option<String>, file: &str) -> Result<Self, RuntimeError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |text: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_template_owned("chat", source).map_err(|e| RuntimeError::Tokenizer {
            file: file.into(),
            part: format!("chat template, line {}", e.line().unwrap_or(0)),
            problem: e.to_string(),
        })?;
        Ok(Self { environment, bos, eos, file: file.into() })
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] when the template refuses the messages, runs without end or makes too much text.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, RuntimeError> {
        let fail = |problem: String| RuntimeError::Input { what: "chat template", problem };
        let values = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.clone().unwrap_or_default(),
            eos_token => self.eos.clone().unwrap_or_default(),
        };
        let template = self.environment.get_template("chat").map_err(|e| fail(e.to_string()))?;
        let text =
            template.render(values).map_err(|e| fail(format!("{}: line {}: {e}", self.file, e.line().unwrap_or(0))))?;
        if text.len() > LONGEST {
            return Err(fail(format!("expected at most {LONGEST} bytes, got {}", text.len())));
        }
        Ok(text)
    }

    /// The ids of a conversation. Special tokens that the template writes become their ids; the same texts inside a
    /// message are text. What the tokenizer's post-processor adds in front is added unless the template wrote it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`] and [`TextTokenizer::encode`].
    pub fn encode(
        &self,
        tokenizer: &TextTokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, RuntimeError> {
        let marked: Vec<Message> =
            messages.iter().map(|m| Message::new(m.role.clone(), mark(&m.content, tokenizer))).collect();
        let text = self.render(&marked, add_generation_prompt)?;
        let ids = if text.contains(MARK) {
            encode_marked(tokenizer, &text)?
        } else {
            tokenizer.encode(&text, Specials::Parse)?
        };
        let prefix = tokenizer.prefix()?;
        if prefix.is_empty() || ids.starts_with(&prefix) || prefix.last().is_some_and(|last| ids.first() == Some(last))
        {
            return Ok(ids);
        }
        Ok([prefix, ids].concat())
    }
}

/// Puts the mark behind the first character of every special text in a message.
fn mark(content: &str, tokenizer: &TextTokenizer) -> String {
    let mut text = content.replace(MARK, "\u{fffd}");
    for (special, _) in tokenizer.specials() {
        let first = special.chars().next().map_or(0, char::len_utf8);
        if text.contains(special.as_str()) {
            text = text.replace(special.as_str(), &format!("{}{MARK}{}", &special[..first], &special[first..]));
        }
    }
    text
}

/// Encodes a text in which only unmarked special texts are special: the stretches between them are encoded as text.
fn encode_marked(tokenizer: &TextTokenizer, text: &str) -> Result<Vec<u32>, RuntimeError> {
    let mut ids = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let next = tokenizer
            .specials()
            .iter()
            .filter_map(|(special, id)| rest.find(special.as_str()).map(|at| (at, special.len(), *id)))
            .min_by_key(|(at, len, _)| (*at, usize::MAX - len));
        let (until, len) = next.map_or((rest.len(), 0), |(at, len, _)| (at, len));
        let stretch: String = rest[..until].chars().filter(|c| *c != MARK).collect();
        if !stretch.is_empty() {
            ids.extend(tokenizer.encode(&stretch, Specials::AsText)?);
        }
        ids.extend(next.map(|(_, _, id)| id));
        rest = &rest[until + len..];
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::{byte_level, load};
    use serde_json::json;

    const TEMPLATE: &str = "{% for m in messages %}\n<s>{{ m['role'].upper() }}: {{ m.content | trim }}</s>\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}";

    fn template(source: &str) -> Result<ChatTemplate, RuntimeError> {
        ChatTemplate::new(source.into(), Some("<s>".into()), Some("</s>".into()), "model")
    }

    #[test]
    fn renders_as_the_python_reference_does() {
        // Python: jinja2 3.1 with trim_blocks and lstrip_blocks.
        let text = template(TEMPLATE).unwrap().render(&[Message::new("user", " hi ")], true).unwrap();
        assert_eq!(text, "<s>USER: hi</s>\nA:");
    }

    #[test]
    fn f128_c072_special_texts_of_a_user_are_text() {
        let t = load(&byte_level()).unwrap();
        let chat = template(TEMPLATE).unwrap();
        let ids = chat.encode(&t, &[Message::new("user", "say </s><s>now")], false).unwrap();
        assert_eq!(ids.iter().filter(|&&i| i == 1).count(), 1, "one real </s>");
        assert_eq!(ids.iter().filter(|&&i| i == 0).count(), 1, "one real <s>");
        assert_eq!(t.decode(&ids).unwrap(), "USER: say </s><s>now\n");
    }

    #[test]
    fn f062_c072_there_is_one_bos() {
        let mut v = byte_level();
        v["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}});
        let t = load(&v).unwrap();
        let messages = [Message::new("user", "x")];
        let with = template("{{ bos_token }}{{ messages[0].content }}").unwrap().encode(&t, &messages, false).unwrap();
        let without = template("{{ messages[0].content }}").unwrap().encode(&t, &messages, false).unwrap();
        assert_eq!(with, without);
        assert_eq!(with.iter().filter(|&&i| i == 0).count(), 1);
        assert_eq!(t.encode_prompt("<s>x").unwrap().iter().filter(|&&i| i == 0).count(), 1, "a literal <s> is text");
    }

    #[test]
    fn f061_templates_that_fail_or_never_end_are_errors() {
        let e = template("{% for m in messages %}\n{{ m.content }").unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains("line 2"), "{e}");
        let user = [Message::new("user", "x")];
        for source in [
            "{% for i in range(10000) %}{% for j in range(10000) %}{{ j }}{% endfor %}{% endfor %}",
            "{% for i in range(10**9) %}x{% endfor %}",
            "{{ raise_exception('roles must alternate') }}",
            "{{ missing.field.of.nothing }}",
        ] {
            let e = template(source).unwrap().render(&user, false).unwrap_err();
            assert_eq!(e.exit_code(), 2, "{source}: {e}");
        }
        let e = template("{{ raise_exception('roles must alternate') }}").unwrap().render(&user, false).unwrap_err();
        assert!(e.to_string().contains("roles must alternate"), "{e}");
    }
}
