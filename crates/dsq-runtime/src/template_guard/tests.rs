//! Hostile templates are errors, and templates of models render as without the guard. Not the goldens of real models (see
//! `tests/golden`).

use super::*;
use crate::{Chat, ChatTemplate, Message};
use serde_json::json;

fn rendered(source: &str) -> Result<String, RuntimeError> {
    let messages = [Message::new("system", "be brief"), Message::new("user", "hello")];
    ChatTemplate::new(source.into(), Some("<s>".into()), Some("</s>".into()), "model")?.render(&Chat {
        messages: &messages,
        add_generation_prompt: true,
        ..Default::default()
    })
}

/// Each must be an error that holds `expected`, in a thread with the usual 2 MiB of stack.
fn refuses(expected: &str, sources: &[&str]) {
    for source in sources {
        let e = rendered(source).map(|text| text.chars().take(80).collect::<String>()).expect_err(source);
        let short: String = source.chars().take(200).collect();
        assert!(e.to_string().contains(expected) && e.to_string().contains("line"), "{short}: {e}");
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(2_000_000));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment
}

/// The text with the guard, which must be that without it.
fn same(source: &str, values: &serde_json::Value) -> String {
    let mut plain = environment();
    plain.add_template_owned("chat", source.to_string()).unwrap();
    let values = Value::from_serialize(values);
    let expected = plain.get_template("chat").unwrap().render(&values).unwrap();
    let mut guarded = environment();
    add(&mut guarded, source.into(), "model").unwrap();
    assert_eq!(render(&guarded, values).unwrap(), expected, "{source}");
    expected
}

#[test]
fn c072_a_namespace_inside_itself_is_refused() {
    refuses(
        "namespace inside",
        &[
            "{% set ns = namespace(n=0) %}{% set ns.n = [ns] %}{{ ns.n }}",
            "{% set ns = namespace() %}{% set ns.n = ns %}{{ ns.n }}",
            "{% set ns = namespace() %}{% set a = ns %}{% set ns.n = {'k': a} %}{{ ns|string }}",
            "{% set ns = namespace() %}{% with b = ns %}{% set ns.n = [1, [b]] %}{% endwith %}{{ ns.n ~ '' }}",
            "{% set ns = namespace() %}{% for m in [ns] %}{% set ns.n = m %}{% endfor %}{{ ns|tojson }}",
            "{% set ns = namespace() %}{% macro f(x) %}{% set x.n = x %}{% endmacro %}{{ f(ns) }}{{ ns.n == ns.n }}",
            "{% set ns = namespace() %}{% set ns.n = dict(a=ns) %}{{ ns.n|join }}",
            "{% set ns = namespace() %}{% set ns.n = none|default(ns, true) %}{{ ns }}",
            "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a }}",
            "{% set ns = namespace() %}{% set ns.n = (ns if true else 0) %}{{ ns }}",
            "{% set ns = namespace() %}{% set x, y = [ns, 1] %}",
        ],
    );
    refuses(
        "of the engine",
        &[
            "{% set ns = namespace() %}{% macro f() %}{{ ns }}{% endmacro %}{% set ns.f = f %}{{ ns }}",
            "{% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns }}",
        ],
    );
}

#[test]
fn c072_values_nested_too_deep_are_refused() {
    let set = "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}";
    let doubled = "{% set a = [a] %}".repeat(5000);
    refuses(
        "nested",
        &[
            &format!("{set}{{% set ns.a = [ns.a] %}}{{% endfor %}}{{{{ ns.a }}}}"),
            &format!("{set}{{% set ns.a = [ns.a] %}}{{% endfor %}}dropped"),
            &format!("{set}{{% set ns.a = {{'a': ns.a}} %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = dict(a=ns.a) %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = [ns.a]|list %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = [ns.a]|batch(1) %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = {{'a': ns.a}}.items() %}}{{% endfor %}}"),
            &format!("{{% set a = 1 %}}{doubled}{{{{ a }}}}"),
        ],
    );
    // Lazy sequences hold those that they were made from: plain lists here, so these are short and end.
    let lazy = "{% set ns = namespace(a=[1, 2]) %}{% for i in range(50000) %}{% set ns.a = ns.a[0:] %}{% endfor %}";
    assert_eq!(rendered(&format!("{lazy}{{{{ ns.a }}}}")).unwrap(), "[1, 2]");
    let chain = format!("{{{{ [1, 2]{} }}}}", "[0:]".repeat(200));
    assert_eq!(rendered(&chain).unwrap(), "[1, 2]");
}

#[test]
fn c072_values_too_large_are_refused() {
    let set = "{% set ns = namespace(a='xxxxxxxx', l=[1]) %}{% for i in range(60) %}";
    refuses(
        "got",
        &[
            &format!("{set}{{% set ns.a = ns.a ~ ns.a %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = ns.a + ns.a %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = ns.a|replace('x', ns.a) %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = ns.a.replace('', ns.a) %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a %}}{{{{ ns.a }}}}{{{{ ns.a }}}}{{% endset %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.l = ns.l + ns.l %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.l = [ns.l, ns.l] %}}{{% endfor %}}{{{{ ns.l }}}}"),
            &format!("{set}{{% set ns.l = ns.l * 10 %}}{{% endfor %}}"),
            &format!("{set}{{% set ns.a = ns.a * 10 %}}{{% endfor %}}"),
            &format!("{{% set a = [1] %}}{}{{{{ a }}}}", "{% set a = [a, a] %}".repeat(50)),
            "{% set n = 99999999 %}{{ 'x' * n }}",
            "{% set n = 1000000000000 %}{{ ([1] * n)|list }}",
            "{{ ([1] * 1000000000000)|join }}",
            "{% set n = 9223372036854775807 %}{{ [1, 2] * n }}",
            "{% set n = -9223372036854775807 - 1 %}{{ [1, 2][::n] }}",
            "{{ range(9223372036854775807, -9223372036854775807, -1) }}",
            "{{ 'a'|indent(1000000000) }}",
            "{{ '%1000000000d'|format(1) }}",
            "{{ '{:>1000000000}'.format('a') }}",
            "{{ [1]|batch(1000000000, 0) }}",
            "{{ [1]|slice(1000000000) }}",
            "{% set s = 'x' * 1000 %}{% set s = s ~ s ~ s ~ s %}{% set s = s|replace('x', s) %}{{ range(9999)|join(s) }}",
            "{% set s = 'x' * 1000 %}{% set s = s|replace('x', s) %}{% for i in range(90000) %}{{ s }}{% endfor %}",
            &format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "raw text ".repeat(20_000)),
            "{{ 'x' * 100000000 }}",
            "{{ 'x' * 1000 * 1000 * 1000 }}",
            "{{ ('x' ~ 'y') * 10 ** 8 }}",
            "{{ loop.cycle() }}{% for i in [1] %}{{ loop.cycle() }}{% endfor %}",
            "{% set a = [[1], [2]] %}{{ dict(**a) ~ range(*a, *a) }}",
        ],
    );
    assert_eq!(rendered("{{ 'abc'.count('') }} {{ 'aba'.count('a') }}").unwrap(), "4 2");
    assert!(rendered("{{ debug() }}").is_err());
}

#[test]
fn c072_source_nested_too_deep_is_refused() {
    for (open, middle, close) in [
        ("(", "1", ")"),
        ("[", "1", "]"),
        ("{'a':", "1", "}"),
        ("not ", "1", ""),
        ("-", "1", ""),
        ("a if b else ", "1", ""),
        ("1+", "1", ""),
        ("a~", "a", ""),
        ("a**", "a", ""),
        ("a and ", "a", ""),
        ("a<", "a", ""),
        ("", "a", ".a"),
        ("", "a", "[0]"),
        ("", "a", "()"),
        ("", "a", "|f"),
        ("", "a", " is f"),
    ] {
        let long = format!("{{{{ {}{middle}{} }}}}", open.repeat(20_000), close.repeat(20_000));
        refuses("", &[&long]);
        // The longest that the tokens allow must not overflow the stack, whatever comes of it.
        for count in [100, 140, 250, 330, 500, 1000] {
            let _ = rendered(&format!("{{{{ {}{middle}{} }}}}", open.repeat(count), close.repeat(count)));
        }
    }
    for (open, close) in [
        ("{% if a %}", "{% endif %}"),
        ("{% if a %}{% else %}", "{% endif %}"),
        ("{% for a in b %}", "{% endfor %}"),
        ("{% with a = 1 %}", "{% endwith %}"),
        ("{% set a %}", "{% endset %}"),
        ("{% filter upper %}", "{% endfilter %}"),
        ("{% macro a() %}", "{% endmacro %}"),
        ("{% call a() %}", "{% endcall %}"),
    ] {
        refuses("", &[&format!("{}{}", open.repeat(5000), close.repeat(5000))]);
        for count in [50, 140, 149] {
            let _ = rendered(&format!("{}{}", open.repeat(count), close.repeat(count)));
        }
    }
    refuses("elif", &[&format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(10_000))]);
    rendered(&format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(MOST_ELIF))).unwrap();
    refuses("bytes", &[&"x".repeat(LONGEST_SOURCE + 1)]);
}

#[test]
fn c072_calls_without_end_are_refused() {
    refuses(
        "recursion",
        &[
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
            "{% macro f(x) %}{% for a in [1] %}{% with b = x %}{{ f(b) ~ '' }}{% endwith %}{% endfor %}{% endmacro %}{{ f(1) }}",
            "{% macro f() %}{{ caller }}{% call f() %}x{% endcall %}{% endmacro %}{% call f() %}x{% endcall %}",
            "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
            "{% block a %}{{ self.a() }}{% endblock %}",
        ],
    );
    refuses(
        "include",
        &["{% include 'chat' %}", "{% extends 'chat' %}", "{% import 'chat' as a %}", "{% from 'chat' import a %}"],
    );
}

#[test]
fn templates_as_models_bring_them_render_as_without_the_guard() {
    let values = json!({
        "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": true,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what is the weather?"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nlet me see", "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Kyiv", "days": [1, 2]}}}]},
            {"role": "tool", "content": "sunny"},
            {"role": "user", "content": "thanks"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}}}}}],
    });
    for (source, expected) in [
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "5"),
        (
            "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.l|join(',') }}",
            "system,user,assistant,tool,user",
        ),
        (
            "{% set ns = namespace(i=0) %}{% for m in messages[::-1] %}{% set ns.i = loop.index0 %}{% endfor %}{{ ns.i }}",
            "4",
        ),
        (
            "{% set ns = namespace() %}{% for m in messages %}{% set ns.last = m %}{% endfor %}{{ ns.last.content }}",
            "thanks",
        ),
        (
            "{% set ns = namespace(a=1, b='x') %}{% macro f(n) %}{% set n.a = n.a + 1 %}{{ n.a }}{% endmacro %}{{ f(ns) }}{{ ns.a }}{{ ns.b }}",
            "22x",
        ),
        (
            "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ m.role[0] }}{% endfor %}",
            "<s>uatu",
        ),
        (
            "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{% endfor %}",
            "let me see",
        ),
        (
            "{% for m in messages if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}",
            "weather({\"city\":\"Kyiv\",\"days\":[1,2]})",
        ),
        (
            "{% for k, v in tools[0].function.parameters.properties.items() %}{{ k }}: {{ v.type }}{% endfor %}",
            "city: string",
        ),
        (
            "{% macro show(x) %}{% if x is mapping %}{% for k, v in x|items %}{{ k }}={{ show(v) }};{% endfor %}{% elif x is sequence and x is not string %}{% for v in x %}{{ show(v) }},{% endfor %}{% else %}{{ x }}{% endif %}{% endmacro %}{{ show(tools) }}",
            "function=name=weather;parameters=properties=city=type=string;;;type=object;;;type=function;,",
        ),
        (
            "{% macro wrap(a) %}<{{ a }}>{{ caller() }}</{{ a }}>{% endmacro %}{% call wrap('b') %}{{ messages|length }}{% endcall %}",
            "<b>5</b>",
        ),
        (
            "{{ '=' * 20 }}{{ 'a' ~ 1 ~ [1, 'b'] }}{{ [1] + [2] }}{{ range(3)|list }}{{ 7 // 2 * 3 }}",
            "====================a1[1, \"b\"][1, 2][0, 1, 2]9",
        ),
        (
            "{{ messages|map(attribute='role')|unique|join('/') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
            "system/user/assistant/tool 2",
        ),
        (
            "{% for m in messages %}{% if loop.previtem and loop.previtem.role != m.role %}|{% endif %}{% if loop.last and add_generation_prompt %}{{ 'go' if m.role == 'user' else 'stop' }}{% endif %}{% endfor %}",
            "||||go",
        ),
        (
            "{% for x in [1, [2, [3]]] recursive %}{% if x is sequence %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
            "1(2(3))",
        ),
        ("{% block a %}{{ messages[1:3]|length }}{% endblock %}{% set x %}b{{ 1 }}{% endset %}{{ x }}", "2b1"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if loop.index > 4 %}{% break %}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
            "aba",
        ),
        (
            "{{ a and b or c or 'd' }}{{ 1 < 2 < 3 }}{{ not x and [] == [] }}{{ {'a': [1]}['a'][0] }}{{ 'abc'[1:] }}",
            "dTrueTrue1bc",
        ),
    ] {
        assert_eq!(same(source, &values), expected, "{source}");
    }
}

#[test]
fn long_conversations_render() {
    let messages: Vec<_> = (0..1000).map(|i| json!({"role": "user", "content": format!("message {i}")})).collect();
    let source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}\
                  {% for n in messages[loop.index:] %}{% break %}{% endfor %}{% endfor %}{{ ns.l|length }}";
    assert_eq!(same(source, &json!({"messages": messages})), "1000");
}
