"""Writes chat.json: conversations through chat templates, as transformers renders them.

    python3 make_chat.py [TOKENIZERS]

The templates in chat/ are of this project. TOKENIZERS is a folder of tokenizers by name (as .ci/fetch-models.sh makes it, in
$DSQ_MODELS/tokenizers): of their templates and conversations only token ids are kept. A rendering that transformers refuses is null.
"""

import json
import os
import pathlib
import sys

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
models = os.environ.get("DSQ_MODELS", os.path.expanduser("~/.cache/dsq"))
TOKENIZERS = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(models) / "tokenizers"
NAMES = ["deepseek_v3", "qwen3", "llama3_1"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place; <b>&amp; 'now'</b>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Ort, z. B. Zürich"},
                "unit": {"type": "string", "enum": ["C", "F", "it's \"K\""]},
                "days": {"type": "number", "minimum": 0.5},
            },
            "required": ["place"],
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": None}}


def call(arguments, number=1):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


SYSTEM = {"role": "system", "content": "  You are brief.\n"}
CHATS = {
    "user": {"messages": [user("  Hello 🙂\n\nwörld ")]},
    "system": {"messages": [SYSTEM, user("Hi")]},
    "turns": {"messages": [SYSTEM, user("1+1?"), assistant("<think>\nhm\n</think>\n\n2"), user("and </note>\n then?")]},
    "answered": {"messages": [user("a"), assistant("<think>x</think>b")], "add_generation_prompt": False},
    "two_users": {"messages": [user("a"), user("b")]},
    "two_systems": {"messages": [SYSTEM, SYSTEM, user("a")]},
    "date": {"messages": [user("x")], "variables": {"date_string": "1 Jan 2025", "enable_thinking": False}},
    "tools": {"messages": [SYSTEM, user("Weather in Zürich?")], "tools": [WEATHER, CLOCK]},
    "no_system_tools": {"messages": [user("Weather in Zürich?")], "tools": [WEATHER]},
    "called_text": {
        "messages": [
            user("Weather?"),
            assistant(None, tool_calls=[call('{"place": "Zürich"}'), call('{"place":"Bern"}', 2)]),
            tool('{"t": 20.0}', name="weather", tool_call_id="call_1"),
            tool("rain", tool_call_id="call_2"),
            assistant("20 degrees in Zürich, rain in Bern."),
            user("Thanks"),
        ],
        "tools": [WEATHER],
    },
    "called_object": {
        "messages": [
            user("Weather?"),
            assistant("I look.", tool_calls=[call({"place": "Zürich", "days": 1.5, "f": 1e-7, "on": True, "x": None, "a": []})]),
            tool("sun", name="weather"),
        ],
        "tools": [WEATHER],
    },
    "reasoned": {
        "messages": [user("q"), assistant("a", reasoning_content="\nwhy\n"), user("q2"), assistant("b", reasoning_content="because")],
        "add_generation_prompt": False,
    },
}


def render(template, chat, special):
    kwargs = {**special, **chat.get("variables", {})}
    try:
        texts, _ = render_jinja_template(
            [chat["messages"]], tools=chat.get("tools"), chat_template=template,
            add_generation_prompt=chat.get("add_generation_prompt", True), **kwargs,
        )
        return texts[0]
    except Exception as error:
        print(f"refused: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def text(token):
    return token["content"] if isinstance(token, dict) else token


out = {"chats": CHATS, "texts": {}, "ids": {}}
for path in sorted((HERE / "chat").glob("*.jinja")):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    out["texts"][path.stem] = {name: render(path.read_text(), chat, special) for name, chat in CHATS.items()}
for name in NAMES:
    config = json.loads((TOKENIZERS / name / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(TOKENIZERS / name / "tokenizer.json"))
    special = {k: text(config[k]) for k in ("bos_token", "eos_token") if config.get(k)}
    rows = {}
    for chat_name, chat in CHATS.items():
        rendered = render(config["chat_template"], chat, special)
        rows[chat_name] = None if rendered is None else tokenizer.encode(rendered, add_special_tokens=False).ids
    out["ids"][name] = rows
(HERE / "chat.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")
