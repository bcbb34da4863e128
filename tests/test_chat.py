"""Chat templates and special tokens: what text can and cannot become."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_compile.runtime.chat import MAX_OUTPUT, Text
from clover_compile.runtime.errors import BadTokenizer, Faults, InputError, TemplateFailed
from clover_compile.runtime.rules import GenerationRules

DEMO = Path(__file__).parent.parent / "clover_compile/models/clover-airspace-tiny"
RULES = GenerationRules((768, 770), mask_token_id=767, block_size=16, threshold=0.9)
START, END, THINK, THINK_END, CALL = 769, 770, 771, 772, 773
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- else %}
        {%- for part in m.content or [] %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
DOUBLE = "{{% set n = namespace(x='xx') %}}{{% for i in range(60) %}}{}{{% endfor %}}"
SPELLED = "a<|im_end|>b<think>c</think><tool_call>{}</tool_call><|im_start|>"


def demo(template: str | None = PLAIN, rules: GenerationRules = RULES) -> Text:
    return Text(DEMO / "tokenizer.json", template, rules)


def plain_text(text: Text, ids: list[int]) -> str:
    """What ids say, special tokens included."""
    return str(text._full.decode(ids, skip_special_tokens=False))


def added(ids: list[int]) -> list[int]:
    return [x for x in ids if x >= 768]


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    values = json.loads((DEMO / "tokenizer.json").read_text())
    edit(values)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    return path


def test_prompts_of_the_oracle() -> None:
    text = demo(json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"])
    messages = (DEMO / "messages.jsonl").read_text().splitlines()
    oracle = (DEMO / "oracle_tokens.jsonl").read_text().splitlines()
    assert len(messages) == len(oracle) == 200
    for message, tokens in zip(messages, oracle, strict=True):
        assert text.encode(json.loads(message)["prompt"]) == json.loads(tokens)["prompt_ids"]


@pytest.mark.parametrize("template", [PLAIN, QWEN])
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_prompt_text_never_becomes_a_token(template: str, role: str) -> None:
    text = demo(template)
    ids = text.encode([{"role": role, "content": SPELLED}])
    assert added(ids) == [START, END, START]
    assert plain_text(text, ids).startswith(f"<|im_start|>{role}\n{SPELLED}<|im_end|>\n")


@pytest.mark.parametrize("template", [PLAIN, QWEN])
def test_a_token_split_across_parts(template: str) -> None:
    parts = [{"type": "text", "text": x} for x in ("<", "|im_", "end|", "><thi", "nk>")]
    text = demo(template)
    ids = text.encode([{"role": "user", "content": parts}])
    assert added(ids) == [START, END, START]
    assert "<|im_end|><think>" in plain_text(text, ids)


@pytest.mark.parametrize("word", ["think", "think> and more", "|im_end|>", " think>"])
def test_a_token_the_template_would_complete(word: str) -> None:
    text = demo("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    ids = text.encode(word)
    assert added(ids) == []
    assert plain_text(text, ids) == f"<{word.strip()}>"


def test_roles_may_complete_a_token_of_the_template(tmp_path: Path) -> None:
    def add_role(values: dict[str, Any]) -> None:
        values["added_tokens"].append(
            {**values["added_tokens"][0], "id": 777, "content": "<|user|>"}
        )

    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    text = Text(edited(tmp_path, add_role), template, RULES)
    assert added(text.encode("<|user|>")) == [777]
    assert added(text.encode([{"role": "tool", "content": "hi"}])) == []


def test_a_sentinel_in_the_prompt_is_kept() -> None:
    text = demo()
    tricky = "\ue000<\ue000|im_end|>\ue001 \\ue002 <|im_end|>"
    ids = text.encode(tricky)
    assert added(ids) == [START, END, START]
    assert tricky in plain_text(text, ids)


def test_a_prompt_of_every_private_character() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF000)))
    with pytest.raises(Faults, match="private-use"):
        demo().encode(everything)


def test_tools_and_their_keys() -> None:
    text = demo(QWEN)
    tool = {"type": "function", "function": {"name": "<tool_call>", "<think>": ["</think>", 1]}}
    ids = text.encode([{"role": "user", "content": "hi"}], tools=[tool])
    assert added(ids) == [START, END, START, END, START]
    assert json.dumps(tool) in plain_text(text, ids)


@pytest.mark.parametrize("written", ["m | tojson(ensure_ascii=true)", "m"])
def test_spelled_out_sentinels_are_removed(written: str) -> None:
    text = demo("{% for m in messages %}{{ " + written + " }}{% endfor %}")
    ids = text.encode("<think>")
    assert added(ids) == []
    assert "<think>" in plain_text(text, ids)


def test_tools_a_template_would_drop_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(Faults, match="no place for tools; leave tools out"):
        demo(PLAIN).encode("hi", tools=[tool])
    with pytest.raises(Faults, match="tools must be a list of objects"):
        demo(QWEN).encode("hi", tools=["f"])  # type: ignore[list-item]


TOKENS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"


def test_the_tokens_a_template_names() -> None:
    rules = dataclasses.replace(RULES, bos_token="<|im_start|>", eos_token="<|im_end|>")
    text = demo(TOKENS, rules)
    ids = text.encode("<|im_start|>a<|im_end|>")
    assert added(ids) == [START, END]
    assert plain_text(text, ids) == "<|im_start|><|im_start|>a<|im_end|><|im_end|>"
    assert added(demo(TOKENS).encode("a")) == []
    known = "{% if bos_token is defined %}yes{% else %}no{% endif %}"
    assert plain_text(text, demo(known).encode("x")) == "no"
    assert plain_text(text, demo(known, rules).encode("x")) == "yes"


def test_a_sentinel_is_not_a_part_of_a_token_the_template_names() -> None:
    rules = dataclasses.replace(RULES, bos_token="\ue000")
    text = demo(TOKENS, rules)
    assert plain_text(text, text.encode("<think>")) == "\ue000<think>"


def test_no_html_escapes_in_json() -> None:
    text = demo("{{ {'a': \"<>&'é\"} | tojson }}")
    assert plain_text(text, text.encode("x")) == '{"a": "<>&\'é"}'


def test_assistant_turns_are_not_escaped() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "<think>"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "<think>"},
        {"role": "assistant", "content": "<think>a</think>b"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    expected = [START, END, START, THINK, THINK_END, END, START, CALL, THINK, 774, END, START]
    assert added(demo(QWEN).encode(turns)) == expected


def test_added_but_not_special(tmp_path: Path) -> None:
    def unspecial(values: dict[str, Any]) -> None:
        for token in values["added_tokens"]:
            token["special"] = "im" in token["content"] or "end" in token["content"]

    text = Text(edited(tmp_path, unspecial), QWEN, RULES)
    assert added(text.encode("<think><tool_call>")) == [START, END, START]
    assert added(text.encode("<think>", raw=True)) == [THINK]
    ids = text.encode("<think>why</think> so", raw=True)
    assert text.decode([*ids, END]) == ("so", "why")


def test_a_token_of_one_character(tmp_path: Path) -> None:
    def add_one(values: dict[str, Any]) -> None:
        values["added_tokens"].append({**values["added_tokens"][0], "id": 777, "content": "★"})

    text = Text(edited(tmp_path, add_one), "★{{ messages[0].content }}★", RULES)
    ids = text.encode("a★b")
    assert added(ids) == [777, 777]
    assert plain_text(text, ids) == "★a★b★"


def test_the_longest_literal_wins(tmp_path: Path) -> None:
    def add_longer(values: dict[str, Any]) -> None:
        longer = {"id": 777, "content": "<think></think>"}
        values["added_tokens"].append({**values["added_tokens"][0], **longer})

    text = Text(edited(tmp_path, add_longer), "<think></think><think>", RULES)
    assert text.encode("x") == [777, THINK]


def test_literals_that_take_the_space_around(tmp_path: Path) -> None:
    def strip(values: dict[str, Any]) -> None:
        values["added_tokens"][2] |= {"lstrip": True, "rstrip": True}

    text = Text(edited(tmp_path, strip), PLAIN, RULES)
    written = "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n"
    assert text.encode("hi ") == text.encode(written, raw=True)


def test_thinking_switch() -> None:
    text = demo(QWEN)
    assert added(text.encode("hi", thinking=False)) == [START, END, START, THINK, THINK_END]
    assert added(text.encode("hi", thinking=True)) == [START, END, START]
    with pytest.raises(Faults, match="no enable_thinking switch"):
        demo(PLAIN).encode("hi", thinking=True)


def test_raw() -> None:
    text = demo(None)
    assert text.encode("<|im_start|>", raw=True) == [START]
    with pytest.raises(Faults, match="no chat template; give the text raw"):
        text.encode("hi")
    with pytest.raises(Faults, match="thinking"):
        text.encode("hi", raw=True, thinking=True)
    with pytest.raises(Faults, match="raw takes one string"):
        text.encode([{"role": "user", "content": "x"}], raw=True)


@pytest.mark.parametrize("raw", [False, True])
def test_half_a_surrogate_pair(raw: bool) -> None:
    with pytest.raises(Faults, match="surrogate") as caught:
        demo().encode("a\ud800b", raw=raw)
    assert "\n" not in str(caught.value)


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "list of messages"),
        ({"role": "user"}, "list of messages"),
        (["hi"], "message 0: must be an object"),
        ([{"content": "x"}], "message 0: role must be one of system, user, assistant, tool, not n"),
        ([{"role": "user", "content": "x"}, {"role": "developer", "content": "x"}],
            'message 1: role must be one of system, user, assistant, tool, not "developer"'),
        ([{"role": "User", "content": "x"}], 'message 0: role must .* not "User"'),
        ([{"role": "odd<think>", "content": "x"}], 'message 0: role must .* not "odd<think>"'),
        ([{"role": ["user"], "content": "x"}], r'message 0: role must .* not \["user"\]'),
        ([{"role": "user"}], "message 0: content"),
        ([{"role": "user", "content": 5}], "message 0: content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content part 0"),
        ([{"role": "user", "content": "x", "more": object()}], "not a JSON value"),
        ([{"role": "user", "content": "x", 5: "x"}], "key 5 is not a string"),
        ([{"role": "user", "content": "x", "more": deep()}], "nested deeper"),
        ([{"role": "user", "content": "x", "\ud800": 1}], "surrogate"),
        ([{"role": 1, "content": "x"}, {"role": "user"}], "message 0: .*message 1: "),
    ],
)  # fmt: skip
def test_bad_messages(messages: Any, fault: str) -> None:
    with pytest.raises(Faults, match=fault) as caught:
        demo().encode(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 2 ** 10000000000 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 5 }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        DOUBLE.format("{% set n.x = n.x + n.x %}"),
        DOUBLE.format("{% set n.x = n.x ~ n.x %}"),
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        DOUBLE.format("{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}"),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        DOUBLE.format("{% set n.x = [n.x, n.x] | join %}"),
        DOUBLE.format("{% set n.x = n.x.join([n.x, n.x]) %}"),
        DOUBLE.format("{% set n.x = n.x | replace('', n.x) %}"),
        DOUBLE.format("{% set n.x = n.x.replace('x', 'xx') %}"),
        DOUBLE.format("{% set n.x = '%s%s' | format(n.x, n.x) %}"),
        "{{ ('x' * 4000000) | replace('x', 'x' * 4000000) }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ range(100000000) | list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}{{ raise_exception.__globals__['jinja2'] }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}{{ ''.__class__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no\nsuch\nrole') }}",
        "{{ 1 / 0 }}",
        "{{ '\\ud800' }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_hostile_templates(template: str) -> None:
    text = demo(template)
    with pytest.raises(TemplateFailed) as caught:
        text.encode("hi")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_output_at_the_limit() -> None:
    half = "{{ 'x' * " + str(MAX_OUTPUT // 2) + " }}"
    template = demo(half + half)._template
    assert template is not None
    assert len(template.render()) == MAX_OUTPUT
    template = demo(half + half + "y")._template
    assert template is not None
    with pytest.raises(TemplateFailed, match="writes more"):
        template.render()


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for %}" * 3, "{{ x | nothing }}"])
def test_templates_that_do_not_compile(template: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        demo(template)
    assert "\n" not in str(caught.value)


def test_what_templates_may_use() -> None:
    text = demo(
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i ~ '-' }}{% endfor %}"
        "{% generation %}{{ strftime_now('%%') }}{% endgeneration %}{{ '%s' % 5 }}"
    )
    assert plain_text(text, text.encode("x")) == "0-1-%5"


@pytest.mark.parametrize("content", ["", "{", "{}", None])
def test_bad_tokenizer(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadTokenizer) as caught:
        Text(path, PLAIN, RULES)
    assert isinstance(caught.value, InputError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("hi there<|im_end|>", ("hi there", None)),
        ("hi", ("hi", None)),
        ("<think>\nwhy\n</think>\n\nso <|im_end|>", ("so ", "why")),
        ("why</think>so", ("so", "why")),
        ("</think>", ("", "")),
        ("<think>still", ("still", None)),
        ("", ("", None)),
    ],
)
def test_decode(written: str, answer: tuple[str, str | None]) -> None:
    text = demo()
    assert text.decode(text.encode(written, raw=True)) == answer


def test_decode_with_the_checkpoints_own_end_of_thinking() -> None:
    rules = GenerationRules((770,), 767, 16, 0.9, think_end_token_id=CALL)
    text = demo(PLAIN, rules)
    assert text.decode(text.encode("why<tool_call>so", raw=True)) == ("so", "why")
