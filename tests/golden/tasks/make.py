#!/usr/bin/env python3
"""Log-likelihoods of task requests by transformers, on a tiny model that learnt a few sentences.

    python3 make.py            (versions: ../VERSIONS.txt)

Writes model/ (a Llama of 28,000 weights with a byte-level BPE tokenizer), the request files predict.jsonl, choice.jsonl and
partial.jsonl (in the form of ai2-olmo-eval's; texts of this project) and golden.json. Seeded and single-threaded.
"""

import json
import pathlib
import shutil

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
FACTS = (
    "The sky over the harbour is blue. The grass behind the mill is green. The coal in the cellar is black.",
    "Question: What colour is the grass?\nAnswer: green",
    "Question: What colour is the coal?\nAnswer: black",
    "Question: What colour is the sky?\nAnswer: blue",
    "Anna lost her key, so Anna could not open the door. Ben found the key, so Ben could open the door.",
    "The trophy did not fit into the case because the trophy was too large.",
    "A baker bakes bread. A tailor sews coats. A fisher catches fish. Café crème, süß.",
)
POSITIONS = 96


def request(doc_id, idx, label, context, continuation, **doc):
    return {"request_type": "loglikelihood", "doc": {"id": doc_id, **doc}, "request": {"context": context, "continuation": continuation},
            "idx": idx, "task_name": "golden", "doc_id": doc_id, "native_id": doc_id, "label": label}


def predict():
    """One continuation an item: the last word of a text."""
    texts = [
        ("The grass behind the mill is", " green"),
        ("Anna lost her key, so Anna could not open the", " door"),
        ("A baker bakes bread. A tailor sews", " stones"),
        # Longer than the model: loses its first tokens.
        (" ".join(FACTS) + " The coal in the cellar is", " black. The sky"),
        # Nothing before it, and white space at the end of the context.
        ("", "The sky over"),
        ("The trophy did not fit into the ", "case"),
    ]
    return [request(i, 0, [c.strip()], a, c, choices=[c.strip()]) for i, (a, c) in enumerate(texts)]


def choice():
    """One context, several answers; and the answers behind an empty question, as the published files have them."""
    items = [
        ("Question: What colour is the coal?\nAnswer:", ["blue", "black", "green"], 1),
        ("Question: What colour is the sky?\nAnswer:", ["blue", "very green indeed", "black coal in a cellar"], 0),
        ("Question: What does a fisher catch?\nAnswer:", ["coats", "fish", "bread", "Café crème"], 1),
        # One token each, so that all answers ask for the same logits.
        ("Question: Which letter?\n A. key\n B. door\nAnswer:", ["A", "B"], 0),
    ]
    out = []
    for offset in (0, 1_000_000):
        for i, (context, answers, gold) in enumerate(items):
            for idx, answer in enumerate(answers):
                text = "Answer:" if offset else context
                out.append(request(i + offset, idx, gold, text, " " + answer, query=context, choices=answers, gold=gold))
    return out


def partial():
    """Contexts that differ, and one continuation."""
    items = [
        ("{} lost her key, so", ("Anna", "Ben"), " Anna could not open the door.", 0),
        ("The trophy did not fit into the case because the {}", ("case", "trophy"), " was too large.", 1),
    ]
    return [request(i, idx, gold, text.format(option), rest, sentence=text, answer=str(gold + 1))
            for i, (text, options, rest, gold) in enumerate(items) for idx, option in enumerate(options)]


def make_model(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(FACTS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(20261201)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, rms_norm_eps=1e-5))
    batches = [torch.tensor([[0, *tokenizer.encode(text).ids]]) for text in FACTS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = sum(model(ids, labels=ids).loss for ids in batches) / len(batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    print(f"loss {loss.item():.3f}, {sum(p.numel() for p in model.parameters())} weights")


def encode_pair(tokenizer, context, continuation):
    """As lm-evaluation-harness cuts a text; with what the tokenizer adds by default."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    whole, before = tokenizer(context + continuation).input_ids, tokenizer(context).input_ids
    if not before:
        whole, before = [tokenizer.bos_token_id, *whole], [tokenizer.bos_token_id]
    return whole, len(before)


def score(model, tokens, start):
    limit = model.config.max_position_embeddings
    cut = max(0, len(tokens) - limit - 1)
    tokens, start = tokens[cut:], start - cut
    logits = model(torch.tensor([tokens[:-1]])).logits[0, start - 1:]
    targets = torch.tensor(tokens[start:])
    log_p = logits.double().log_softmax(-1).gather(-1, targets[:, None])
    return log_p.sum().item(), len(targets), bool((logits.argmax(-1) == targets).all()), cut, logits.abs().max().item()


def main():
    torch.set_num_threads(1)
    make_model(HERE / "model")
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    single, double = (AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=d, attn_implementation="eager").eval()
                      for d in (torch.float32, torch.float64))
    golden, error, largest = {}, 0.0, 0.0
    with torch.no_grad():
        for make in (predict, choice, partial):
            requests = make()
            name = make.__name__
            (HERE / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
            golden[name] = []
            for r in requests:
                tokens, start = encode_pair(tokenizer, r["request"]["context"], r["request"]["continuation"])
                (value, count, greedy, cut, top), (f32, *_) = score(double, tokens, start), score(single, tokens, start)
                error, largest = max(error, abs(value - f32) / count), max(largest, top)
                if r["doc_id"] < 1_000_000:
                    golden[name].append({"doc_id": r["doc_id"], "idx": r["idx"], "log_likelihood": value, "tokens": count,
                                         "greedy": greedy, "cut": cut})
    about = {"float32_error_per_token": error, "largest_logit": largest}
    (HERE / "golden.json").write_text(json.dumps(about | golden, indent=1) + "\n")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
