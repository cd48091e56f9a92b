//! The tokenizer keys of GGUF files: what is refused (faults F055, F075, F076, case C050) and what is rebuilt (C072, C076).

mod gguf_writer;

use gguf_writer::*;
use tokenizers::Tokenizer;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

fn rebuilt(writer: &Writer) -> Tokenizer {
    let (file, _folder) = open(&writer.bytes()).unwrap();
    Tokenizer::from_bytes(file.tokenizer_json().unwrap().unwrap()).unwrap()
}

/// The message of a file that opens, but whose tokenizer cannot be rebuilt.
#[track_caller]
fn not_rebuilt(writer: &Writer, parts: &[&str]) {
    let (file, _folder) = open(&writer.bytes()).unwrap();
    for e in [file.tokenizer_json().unwrap_err(), file.aux_files().unwrap_err()] {
        assert_eq!(e.exit_code(), 3);
        for part in parts {
            assert!(e.to_string().contains(part), "{part:?} is missing in: {e}");
        }
        assert!(file.faults().iter().any(|f| f.severity == dsq_checkpoint::Severity::Error));
    }
}

#[test]
fn c050_tokenizer_arrays() {
    let w = toy_with_tokenizer;
    let merges = |list: &[&str]| w().set(MERGES, ARRAY, strings(list));
    refused_with(&merges(&["a b", "ab"]), &["merges[1]", "one space", "\"ab\""]);
    refused_with(&merges(&["a  b"]), &["merges[0]", "one space"]);
    refused_with(&merges(&[" b"]), &["merges[0]", "one space"]);
    refused_with(&w().f32(TYPES, 1.0), &[TYPES, "an array of INT32", "FLOAT32 1"]);
    let scores = |n: usize| w().set(SCORES, ARRAY, array(FLOAT32, &vec![vec![0; 4]; n]));
    refused_with(&w().set(SCORES, ARRAY, array(INT8, &vec![vec![0]; 8])), &[SCORES, "FLOAT32", "8 INT8"]);
    refused_with(&scores(7), &[SCORES, "expected 8", "got 7"]);
    open(&scores(8).bytes()).unwrap();
    for id in ["bos", "eos", "eot", "eom", "unknown", "padding"] {
        let key = format!("tokenizer.ggml.{id}_token_id");
        refused_with(&w().u32(&key, 9), &[&key, "below 8", "got 9"]);
        refused_with(&w().text(&key, "9"), &[&key, "UINT32"]);
    }
    refused_with(&w().without(TOKENS), &[TOKENS, "missing"]);
    refused_with(&w().without("tokenizer.ggml.model"), &["tokenizer.ggml.model", "missing"]);
    refused_with(&w().u32("tokenizer.chat_template", 1), &["tokenizer.chat_template", "STRING", "UINT32 1"]);
}

#[test]
fn f055_merges_of_absent_tokens() {
    for (merge, absent) in [("a c", "\"c\""), ("c a", "\"c\""), ("b a", "\"ba\""), ("ab ab", "\"abab\"")] {
        refused_with(&toy_with_tokenizer().set(MERGES, ARRAY, strings(&["a b", merge])), &["merges[1]", merge, absent]);
    }
}

#[test]
fn f075_unequal_lengths_and_wrong_types() {
    let w = toy_with_tokenizer;
    refused_with(&w().set(TYPES, ARRAY, ints(&[3; 7])), &[TYPES, "expected 8", "got 7"]);
    refused_with(&w().set(TYPES, ARRAY, ints(&[1, 1, 7, 1, 1, 1, 1, 1])), &["token_type[2]", "1 to 6, got 7"]);
    refused_with(&w().set(TYPES, ARRAY, array(UINT32, &vec![vec![1, 0, 0, 0]; 8])), &[TYPES, "INT32", "8 UINT32"]);
    refused_with(&w().set(TOKENS, ARRAY, ints(&[1; 8])), &[TOKENS, "STRING", "8 INT32"]);
    let twice = strings(&["<s>", "</s>", "a", "b", "Ġ", "ab", "a", "<tool>"]);
    refused_with(&w().set(TOKENS, ARRAY, twice), &["tokens[6]", "\"a\"", "token 2"]);
    let empty = strings(&["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab", ""]);
    refused_with(&w().set(TOKENS, ARRAY, empty), &["tokens[7]", "empty"]);
}

#[test]
fn c076_more_tokens_than_rows() {
    let ten = strings(&["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab", "<tool>", "c", "d"]);
    let w = toy_with_tokenizer().set(TOKENS, ARRAY, ten).set(TYPES, ARRAY, ints(&[1; 10]));
    refused_with(&w, &[TOKENS, "1 to 8 tokens", "got 10"]);
    // A vocabulary of absurd size, with rows enough.
    let rows = (1u64 << 20) + 1;
    let w = toy_with_tokenizer().set(TOKENS, ARRAY, array(STRING, &vec![string(""); rows as usize]));
    let w = w.change("token_embd.weight", |t| (t.ne[1], t.data) = (rows, vec![0; 32 * 4 * rows as usize]));
    refused_with(&w, &[TOKENS, "at most 1048576", "got 1048577"]);
    // Fewer tokens than rows is padding.
    let six = strings(&["<s>", "</s>", "a", "b", "Ġ", "ab"]);
    let w = toy_with_tokenizer().set(TOKENS, ARRAY, six).set(TYPES, ARRAY, ints(&[3, 3, 1, 1, 1, 1]));
    let w = w.set(MERGES, ARRAY, strings(&["a b"]));
    assert_eq!(rebuilt(&w).get_vocab_size(true), 6);
    refused_with(&w.u32("tokenizer.ggml.eos_token_id", 7), &["eos_token_id", "below 6", "got 7"]);
}

#[test]
fn f076_pre_tokenizers_are_never_guessed() {
    let pre = "tokenizer.ggml.pre";
    not_rebuilt(&toy_with_tokenizer().without(pre), &[pre, "missing", "smollm"]);
    for name in ["default", "deepseek-llm", "SMOLLM", ""] {
        not_rebuilt(&toy_with_tokenizer().text(pre, name), &[pre, "smollm", &format!("got {name:?}")]);
    }
    not_rebuilt(&toy_with_tokenizer().text("tokenizer.ggml.model", "t5"), &["tokenizer.ggml.model", "gpt2", "t5"]);
    let pieces = || toy_with_tokenizer().text("tokenizer.ggml.model", "llama");
    not_rebuilt(&pieces(), &[SCORES, "missing", "FLOAT32"]);
    let scores = array(FLOAT32, &vec![vec![0; 4]; 8]);
    not_rebuilt(&pieces().set(SCORES, ARRAY, scores), &["tokenizer.ggml.tokens", "each byte", "<0x00>"]);
    not_rebuilt(&toy_with_tokenizer().without(TYPES), &[TYPES, "missing"]);
    not_rebuilt(&toy_with_tokenizer().without(MERGES), &[MERGES, "missing"]);
    let prefix = "tokenizer.ggml.add_space_prefix";
    not_rebuilt(&toy_with_tokenizer().set(prefix, BOOL, vec![1]), &[prefix, "true"]);
}

#[test]
fn rebuilt_tokenizers_split_merge_and_match_special_tokens() {
    let t = rebuilt(&toy_with_tokenizer());
    let ids = |text: &str, special: bool| t.encode(text, special).unwrap().get_ids().to_vec();
    assert_eq!(ids("ab ab", false), [5, 6]);
    assert_eq!(ids("ba  ab", false), [3, 2, 4, 6]);
    assert_eq!(ids("<s>a</s>b<tool>", false), [0, 2, 1, 3, 7]);
    assert_eq!(
        t.decode(&[0, 5, 6, 7], true).unwrap(),
        "ab ab<tool>",
        "a user-defined token is text, a control token is not"
    );
    assert_eq!(ids("ab", true), [5], "no BOS: smollm's default");
}

#[test]
fn c072_bos_and_eos_by_their_flags() {
    let flag = |w: Writer, name: &str, on: bool| w.set(&format!("tokenizer.ggml.{name}"), BOOL, vec![u8::from(on)]);
    let ids = |w: &Writer| rebuilt(w).encode("ab", true).unwrap().get_ids().to_vec();
    let w = toy_with_tokenizer;
    assert_eq!(ids(&flag(w(), "add_bos_token", true)), [0, 5]);
    assert_eq!(ids(&flag(flag(w(), "add_bos_token", true), "add_eos_token", true)), [0, 5, 1]);
    // Llama 3's pre-tokenizer adds BOS unless told otherwise.
    let llama3 = || w().text("tokenizer.ggml.pre", "llama-bpe");
    assert_eq!(ids(&llama3()), [0, 5]);
    assert_eq!(ids(&flag(llama3(), "add_bos_token", false)), [5]);
    let none = w().without("tokenizer.ggml.bos_token_id");
    not_rebuilt(&flag(none, "add_bos_token", true), &["bos_token_id", "missing"]);
}

#[test]
fn ids_of_several_stop_tokens_and_unused_ids() {
    let w = toy_with_tokenizer().u32("tokenizer.ggml.eot_token_id", 7).u32("tokenizer.ggml.eom_token_id", 1);
    let w = w.set(TYPES, ARRAY, ints(&[3, 3, 1, 1, 1, 1, 5, 4])).set(MERGES, ARRAY, strings(&["a b"]));
    let (file, _folder) = open(&w.bytes()).unwrap();
    let dsq_checkpoint::ModelConfig::Llama(config) = file.config() else { panic!("not a llama") };
    assert_eq!(config.eos_token_ids, [1, 7]);
    let files = file.aux_files().unwrap();
    let generation: serde_json::Value = serde_json::from_slice(&files.last().unwrap().1).unwrap();
    assert_eq!(generation, serde_json::json!({"bos_token_id": 0, "eos_token_id": [1, 7]}));
    let t = rebuilt(&w);
    assert_eq!((t.id_to_token(6), t.id_to_token(7)), (None, Some("<tool>".into())), "unused ids stay free");
}
