"""Between text and token ids: the chat template, what text may become a token, and the answer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from clover_compile.runtime.errors import BadTokenizer, Faults, TemplateFailed
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.request import ROLES
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.strict_json import quote
from clover_compile.runtime.template import MAX_OUTPUT, Template, one_ascii_line

__all__ = ["MAX_OUTPUT", "Text"]

Messages = Sequence[Mapping[str, Any]]
MAX_DEPTH = 64
"""Deepest nesting of a message or tool."""

TYPES = frozenset(
    ("text", "function", "string", "number", "integer", "boolean", "object", "array", "null")
)
KEYS = frozenset(
    (
        "arguments", "content", "description", "enum", "function", "id", "items", "name",
        "parameters", "properties", "reasoning_content", "required", "role", "text",
        "tool_call_id", "tool_calls", "type",
    )
)  # fmt: skip
"""Words templates look up or compare, so they stay as they are."""


class Text:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self, tokenizer_json: Path, chat_template: str | None, rules: GenerationRules
    ) -> None:
        """Raises BadTokenizer or TemplateFailed if a file is not usable."""
        self._full, self._plain = _tokenizers(tokenizer_json)
        self._added = _Added(self._full.get_added_tokens_decoder())
        self._template = None if chat_template is None else Template(chat_template)
        tokens = {"bos_token": rules.bos_token, "eos_token": rules.eos_token}
        self._tokens = {name: x for name, x in tokens.items() if x is not None}
        self._stop_ids = frozenset(rules.stop_token_ids)
        self._think_end = rules.think_end_token_id
        if self._think_end is None:
            self._think_end = self._full.token_to_id("</think>")
        markers = (self._full.token_to_id("<think>"), self._think_end)
        self._markers = frozenset(x for x in markers if x is not None)

    def encode(
        self,
        prompt: str | Messages,
        raw: bool = False,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of one user message, of a conversation, or with `raw` of the text as it is.

        Only `raw` text and assistant turns may spell special tokens. `thinking` sets the template's
        `enable_thinking`; `tools` are objects handed to it. Raises Faults for a prompt that is not
        usable, TemplateFailed if the template refuses it.
        """
        if raw:
            return self._encode_raw(prompt, thinking, tools)
        template = self._template
        if template is None:
            raise _fault("the checkpoint has no chat template; give the text raw, or ids")
        if thinking is not None and "enable_thinking" not in template.source:
            raise _fault("the chat template has no enable_thinking switch; leave thinking out")
        if tools is not None and not template.takes_tools:
            raise _fault("the chat template has no place for tools; leave tools out")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        _check_messages(messages)
        if tools is not None:
            _check_tools(tools)
        if not template.takes_parts:
            messages = [_joined(x) for x in messages]
        given = _strings([messages, tools or [], self._tokens])
        sentinel = _unused_character([template.source, *given])
        marker = _Marker(self._added, sentinel)
        switch = {} if thinking is None else {"enable_thinking": thinking}
        rendered = template.render(
            messages=[x if x["role"] == "assistant" else marker.mark(x) for x in messages],
            tools=None if tools is None else marker.mark(tools),
            add_generation_prompt=True,
            **self._tokens,
            **switch,
        )
        return self._encode_rendered(rendered, sentinel)

    def decode(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Text and reasoning of a response; reasoning is None unless the end of thinking occurs."""
        end = len(ids)
        while end and ids[end - 1] in self._stop_ids:
            end -= 1
        kept = list(ids[:end])
        if self._think_end is None or self._think_end not in kept:
            return self._decode(kept), None
        seam = kept.index(self._think_end)
        return self._decode(kept[seam + 1 :]).lstrip(), self._decode(kept[:seam]).strip()

    def _decode(self, ids: Iterable[int]) -> str:
        text: str = self._full.decode(
            [x for x in ids if x not in self._markers], skip_special_tokens=True
        )
        return text

    def _encode_raw(
        self, prompt: str | Messages, thinking: bool | None, tools: object
    ) -> list[int]:
        if not isinstance(prompt, str):
            raise _fault("raw takes one string, not a conversation")
        if thinking is not None or tools is not None:
            raise _fault("raw text passes no chat template, so thinking and tools have no effect")
        if not _is_unicode(prompt):
            raise _fault("the text holds half of a surrogate pair; give valid Unicode")
        return list(self._full.encode(prompt, add_special_tokens=False).ids)

    def _encode_rendered(self, rendered: str, sentinel: str) -> list[int]:
        if not _is_unicode(rendered):
            raise TemplateFailed(reason="it writes half of a surrogate pair")
        # A template that prints JSON in ASCII, or a Python literal, spells the sentinel out.
        rendered = rendered.replace(_spelled(sentinel), sentinel)
        ids: list[int] = []
        for text, literal in self._added.split(rendered, sentinel):
            part = self._plain.encode(text.replace(sentinel, ""), add_special_tokens=False).ids
            if not self._added.ids.isdisjoint(part):
                raise _fault("the tokenizer makes an added token of plain text")
            ids.extend(part)
            if literal is not None:
                ids.append(literal)
        return ids


class _Added:
    """The added tokens, special or not."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        known = {x.content: (i, x) for i, x in tokens.items() if x.content}
        self._by_content = known
        self.ids = frozenset(tokens)
        self.contents = sorted(known, key=len, reverse=True)
        self.first = frozenset(x[0] for x in known)
        self.tails = frozenset(x[i:] for x in known for i in range(1, len(x)))

    def split(self, text: str, sentinel: str) -> Iterator[tuple[str, int | None]]:
        """Plain text and the id of the literal that follows it; None after the last."""
        start = 0
        if self.contents:
            for found in self._pattern(sentinel).finditer(text):
                token = found.group(int(found.lastindex or 0))
                yield text[start : found.start()], self._by_content[token][0]
                start = found.end()
        yield text[start:], None

    def _pattern(self, sentinel: str) -> re.Pattern[str]:
        parts = []
        for content in self.contents:
            token = self._by_content[content][1]
            before = (r"\s*" if token.lstrip else "") + (r"(?<!\w)" if token.single_word else "")
            after = (r"(?!\w)" if token.single_word else "") + (r"\s*" if token.rstrip else "")
            # A sentinel right behind says that the last character came from the prompt.
            parts.append(f"{before}({re.escape(content)})(?!{sentinel}){after}")
        return re.compile("|".join(parts))


class _Marker:
    """Puts a sentinel into prompt text wherever it could be part of an added token."""

    def __init__(self, added: _Added, sentinel: str) -> None:
        self._added, self._sentinel = added, sentinel
        self._longest = max(map(len, added.contents), default=0)

    def mark(self, value: Any, key: str = "") -> Any:
        """The same value with every string in it marked, keys too."""
        if isinstance(value, str):
            fixed = value in ROLES if key == "role" else key == "type" and value in TYPES
            return value if fixed else self._text(value)
        if isinstance(value, Mapping):
            return {k if k in KEYS else self._text(k): self.mark(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(x, key) for x in value]
        return value

    def _text(self, text: str) -> str:
        cuts = {i + 1 for i, x in enumerate(text) if x in self._added.first}
        # A template may write the start of a token itself, as in `<|{{ role }}|>`.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for stop in range(start + 1, min(start + self._longest, end + 1)):
            if text[start:stop] in self._added.tails:
                cuts.add(stop)
        if 0 < end - start < self._longest:
            word = text[start:end]
            if any(word in x for x in self._added.contents):
                cuts.add(end)
        if not cuts:
            return text
        stops = [0, *sorted(cuts), len(text)]
        return self._sentinel.join(text[a:b] for a, b in itertools.pairwise(stops))


def _tokenizers(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer, and the same without any added token."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {"truncation": None, "padding": None}
        full = Tokenizer.from_str(json.dumps(values))
        values |= {"added_tokens": [], "post_processor": None}
        return full, Tokenizer.from_str(json.dumps(values))
    except Exception as error:  # the library raises plain Exception
        raise BadTokenizer(path=path, reason=one_ascii_line(error)) from error


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise _fault("must be a string or a list of messages")
    faults = [x for i, m in enumerate(messages) for x in _message_faults(f"message {i}", m)]
    if faults:
        raise Faults("prompt", tuple(faults))


def _message_faults(where: str, message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f"{where}: must be an object with role and content"
        return
    role = message.get("role")
    if role not in ROLES:
        meant = did_you_mean(role, ROLES)
        yield f"{where}: role must be one of {', '.join(ROLES)}, not {quote(role, 40)}{meant}"
    content = message.get("content")
    if isinstance(content, list | tuple):
        for i, part in enumerate(content):
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or part.get("type", "text") != "text":
                yield f"{where}: content part {i}: must be {{'type': 'text', 'text': ...}}"
    elif not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        yield f"{where}: content must be a string or a list of text parts"
    yield from _value_faults(where, message)


def _check_tools(tools: object) -> None:
    if not isinstance(tools, list | tuple) or not all(isinstance(x, Mapping) for x in tools):
        raise _fault("tools must be a list of objects")
    faults = tuple(_value_faults("tools", tools))
    if faults:
        raise Faults("prompt", faults)


def _value_faults(where: str, value: object, depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{where}: nested deeper than {MAX_DEPTH}"
    elif isinstance(value, str):
        if not _is_unicode(value):
            yield f"{where}: holds half of a surrogate pair; give valid Unicode"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where}: key {one_ascii_line(repr(key))} is not a string"
            else:
                yield from _value_faults(where, key, depth + 1)
            yield from _value_faults(where, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _value_faults(where, item, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float)):
        yield f"{where}: a {type(value).__name__} is not a JSON value"


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "".join(x["text"] for x in content)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that no text holds, not even spelled as an escape."""
    everything = "\n".join(texts)
    used = set(everything) | {chr(int(x, 16)) for x in re.findall(r"u(e[0-9a-f]{3})", everything)}
    for code in range(0xE000, 0xF000):
        if chr(code) not in used:
            return chr(code)
    raise _fault("the text uses every private-use character from U+E000 to U+EFFF")


def _spelled(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(text: str) -> Faults:
    return Faults("prompt", (text,))
