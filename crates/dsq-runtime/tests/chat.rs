//! Chat templates against transformers (`tests/golden/chat.json`), and what a model's folder says of its tokenizer. The
//! templates of three published tokenizers run where they are installed (`.ci/fetch-models.sh`). Not the text of tokens (see
//! `tokenizer.rs`).

use dsq_checkpoint::Checkpoint;
use dsq_runtime::{Chat, ChatTemplate, FillInMiddle, Json, Message, Specials, TextTokenizer};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn cases() -> Json {
    serde_json::from_slice(&std::fs::read(golden("chat.json")).unwrap()).unwrap()
}

/// A conversation of chat.json.
struct Conversation {
    messages: Vec<Message>,
    tools: Vec<Json>,
    variables: Vec<(String, Json)>,
    prompt: bool,
}

impl Conversation {
    fn new(json: &Json) -> Self {
        let list = |name: &str| match json.get(name) {
            Some(Json::List(list)) => list.clone(),
            _ => Vec::new(),
        };
        let variables = match json.get("variables") {
            Some(Json::Map(fields)) => fields.clone(),
            _ => Vec::new(),
        };
        Self {
            messages: list("messages").into_iter().map(|m| Message::from_json(m).unwrap()).collect(),
            tools: list("tools"),
            variables,
            prompt: json.get("add_generation_prompt") != Some(&Json::Bool(false)),
        }
    }

    fn chat(&self) -> Chat<'_> {
        let Self { messages, tools, variables, prompt } = self;
        Chat { messages, tools, variables, add_generation_prompt: *prompt }
    }
}

fn fields(json: &Json) -> &[(String, Json)] {
    let Json::Map(fields) = json else { panic!("expected an object") };
    fields
}

#[test]
fn our_templates_give_the_texts_of_transformers() {
    let cases = cases();
    let mut compared = 0;
    for (name, texts) in fields(cases.get("texts").unwrap()) {
        let source = std::fs::read_to_string(golden("chat").join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into()), name).unwrap();
        for (chat, want) in fields(texts) {
            let conversation = Conversation::new(cases.get("chats").unwrap().get(chat).unwrap());
            match (template.render(&conversation.chat()), want.as_str()) {
                (Ok(got), Some(want)) => assert_eq!(got, want, "{name} {chat}"),
                (Err(e), None) => assert_eq!(e.exit_code(), 2, "{name} {chat}: {e}"),
                (got, want) => panic!("{name} {chat}: expected {want:?}, got {got:?}"),
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 24);
}

/// A published tokenizer and its template, or `None` where it is not installed.
fn published(name: &str) -> Option<(TextTokenizer, ChatTemplate)> {
    let models = match std::env::var_os("DSQ_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/dsq"),
    };
    let folder = models.join("tokenizers").join(name);
    let Ok(bytes) = std::fs::read(folder.join("tokenizer.json")) else {
        let required = std::env::var("DSQ_REQUIRE_MODELS").is_ok_and(|v| v == "1");
        assert!(!required, "DSQ_REQUIRE_MODELS=1, and there is no {}; run .ci/fetch-models.sh", folder.display());
        println!("skipped: no {}; run .ci/fetch-models.sh", folder.display());
        return None;
    };
    let config: Json = serde_json::from_slice(&std::fs::read(folder.join("tokenizer_config.json")).unwrap()).unwrap();
    let text = |name: &str| {
        let value = config.get(name)?;
        value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
    };
    let source = text("chat_template").unwrap();
    let template = ChatTemplate::new(source, text("bos_token"), text("eos_token"), name).unwrap();
    Some((TextTokenizer::from_json(&bytes, name).unwrap(), template))
}

#[test]
fn published_templates_and_tokenizers_give_the_ids_of_transformers() {
    let cases = cases();
    for (name, rows) in fields(cases.get("ids").unwrap()) {
        let Some((tokenizer, template)) = published(name) else { return };
        for (chat, want) in fields(rows) {
            let conversation = Conversation::new(cases.get("chats").unwrap().get(chat).unwrap());
            let got = template.encode(&tokenizer, &conversation.chat());
            let Json::List(want) = want else {
                assert_eq!(got.unwrap_err().exit_code(), 2, "{name} {chat}");
                continue;
            };
            let got: Vec<Json> = got.unwrap().into_iter().map(|id| Json::Number(id.into())).collect();
            assert!(got == *want, "{name} {chat}: {:?}", template.render(&conversation.chat()));
        }
    }
}

/// Whatever a request says, in whatever role, it makes no special token: those of the prompt are as many as without it.
#[test]
fn c072_requests_make_no_special_token_of_published_tokenizers() {
    for name in ["deepseek_v3", "qwen3", "llama3_1"] {
        let Some((tokenizer, template)) = published(name) else { return };
        let bad: String = tokenizer.specials().iter().map(|(text, _)| text.as_str()).take(40).collect();
        let count = |words: &str| {
            let tool = |role: &str| Message {
                fields: vec![("name".into(), Json::String(words.into()))],
                ..Message::new(role, words)
            };
            let messages = [Message::new("system", words), Message::new("user", words), tool("tool")];
            let about = ["name", "description"].map(|name| (name.to_string(), Json::String(words.into())));
            let tools = [Json::Map(vec![("function".into(), Json::Map(about.to_vec()))])];
            let chat = Chat { messages: &messages, tools: &tools, add_generation_prompt: true, variables: &[] };
            let ids = template.encode(&tokenizer, &chat).unwrap();
            (ids.iter().filter(|id| tokenizer.specials().iter().any(|(_, i)| i == *id)).count(), ids)
        };
        let (want, got) = (count("words").0, count(&format!("a{bad}b")));
        assert_eq!(got.0, want, "{name}");
        let literal = tokenizer.encode(&bad, Specials::AsText).unwrap();
        assert!(literal.len() > 40 && got.1.len() > 3 * literal.len() - 10, "{name}: the words are there");
    }
}

#[test]
fn published_tokenizers_fill_in_the_middle_or_say_why_not() {
    for (name, want) in [
        ("deepseek_v3", Some([128_801, 128_800, 128_802])),
        ("qwen3", Some([151_659, 151_661, 151_660])),
        ("llama3_1", None),
    ] {
        let Some((tokenizer, _)) = published(name) else { return };
        let text = "x = '<|fim_suffix|><｜fim▁hole｜>'\n";
        let made = FillInMiddle::new(&tokenizer, text, "漢");
        let Some([prefix, suffix, middle]) = want else {
            assert!(made.unwrap_err().to_string().starts_with("llama3_1: added_tokens: "));
            continue;
        };
        let plain = |s: &str| tokenizer.encode(s, Specials::AsText).unwrap();
        let made = made.unwrap();
        assert_eq!(
            made.prompt,
            [vec![prefix], plain(text), vec![suffix], plain("漢"), vec![middle]].concat(),
            "{name}"
        );
        assert_eq!(tokenizer.decode(&made.prompt).unwrap(), format!("{text}漢"));
    }
}

/// A model with a tokenizer of three letters and two special tokens, and other files beside it.
fn model(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llama_tiny").join(name), dir.path().join(name)).unwrap();
    }
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [
    {"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
    {"id": 5, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "?": 3}, "merges": [["a", "b"]], "unk_token": "?"}}"#;

#[test]
fn the_files_beside_a_model_say_what_begins_and_what_ends_a_text() {
    let open = |files: &[(&str, &str)]| {
        let dir = model(files);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let tokenizer = TextTokenizer::new(&checkpoint);
        let template = tokenizer.as_ref().ok().and_then(|t| ChatTemplate::of_model(&checkpoint, t).unwrap());
        (tokenizer, template)
    };
    let own = Checkpoint::open(&golden("llama_tiny")).unwrap();
    let dsq_checkpoint::ModelConfig::Llama(own) = own.config() else { panic!("a language model") };
    let t = open(&[("tokenizer.json", TOKENIZER)]).0.unwrap();
    assert_eq!(t.encode_prompt("ab").unwrap(), [2]);
    assert!(own.eos_token_ids.iter().all(|id| t.ends().contains(id)));
    let config = r#"{"add_bos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "<end>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}"#;
    let generation = r#"{"eos_token_id": [77, 5]}"#;
    let (t, template) = open(&[
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ]);
    let (t, template) = (t.unwrap(), template.unwrap());
    assert_eq!(t.encode_prompt("ab").unwrap(), [4, 2]);
    let messages = [Message::new("user", "ab")];
    let ids = template.encode(&t, &Chat { messages: &messages, ..Default::default() }).unwrap();
    assert_eq!(ids, [4, 2, 5], "one BOS");
    let mut ends = [own.eos_token_ids.clone(), vec![5, 77]].concat();
    ends.sort_unstable();
    ends.dedup();
    assert_eq!(t.ends(), ends);
    // A post-processor that adds it already is enough.
    let adds = TOKENIZER.replace("\"model\"", r#""post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}}, "model""#);
    let t = open(&[("tokenizer.json", &adds), ("tokenizer_config.json", config)]).0.unwrap();
    assert_eq!(t.encode_prompt("ab").unwrap(), [4, 2]);
    // Faults name the file.
    for (files, words) in [
        (vec![], "tokenizer.json: file: expected tokenizer.json, got no such file"),
        (vec![("tokenizer.json", "{}")], "tokenizer.json: file: cannot be read"),
        (
            vec![(
                "tokenizer.json",
                r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}"#,
            )],
            "tokenizer.json: vocab: expected at least one token, got none",
        ),
        (
            vec![("tokenizer.json", TOKENIZER), ("tokenizer_config.json", "[]")],
            "tokenizer_config.json: file: expected a JSON object",
        ),
        (
            vec![("tokenizer.json", TOKENIZER), ("generation_config.json", r#"{"eos_token_id": -1}"#)],
            "generation_config.json: eos_token_id: expected token ids, got -1",
        ),
    ] {
        let e = open(&files).0.unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains(words), "{e}");
    }
}
