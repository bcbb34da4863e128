"""Checks the text half of a checkpoint: its tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path

from clover_compile.runtime.rules import MAX_TOKEN_TEXT, is_token_text
from clover_compile.runtime.strict_json import JsonFault, quote, read_file, read_json

MAX_TEMPLATE = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


def tokenizer_faults(path: Path, vocab_size: int | None) -> list[str]:
    """Faults of tokenizer.json: unreadable, refused by the tokenizers library, ids too large."""
    try:
        text = read_file(path).decode("utf-8")
    except JsonFault as fault:
        return [f"tokenizer.json {fault}"]
    except UnicodeDecodeError:
        return ["tokenizer.json is not UTF-8 text"]
    from tokenizers import Tokenizer

    try:
        vocab = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library derives from BaseException only
        return [f"tokenizer.json is broken ({quote(str(error))})"]
    if not vocab:
        return ["tokenizer.json holds no tokens"]
    top = max(vocab.values())
    if vocab_size is not None and top >= vocab_size:
        return [f"tokenizer.json holds id {top}, outside the vocabulary of {vocab_size}"]
    return []


def read_tokens(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The texts of `bos_token` and `eos_token` for the template, and what is wrong with them.

    Each is text in tokenizer_config.json, or an object with the text under `content`.
    """
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return {}, []
    try:
        settings = read_json(path)
    except JsonFault as fault:
        return {}, [f"{SETTINGS_FILE} {fault}"]
    tokens: dict[str, str] = {}
    faults = []
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if is_token_text(text):
            tokens[name] = str(text)
        elif value is not None:
            allowed = f"text of 1..{MAX_TOKEN_TEXT} characters or an object with it as content"
            faults.append(f"{SETTINGS_FILE} {name} must be {allowed}, not {quote(value)}")
    return tokens, faults


def read_template(folder: Path) -> tuple[str | None, list[str]]:
    """The chat template (a file of its own goes before tokenizer_config.json) and its faults."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            where = TEMPLATE_FILE
            source: object = read_file(folder / where, MAX_TEMPLATE).decode("utf-8")
        elif (folder / SETTINGS_FILE).is_file():
            where = SETTINGS_FILE
            source = _default(read_json(folder / where).get("chat_template"))
        else:
            return None, []
    except JsonFault as fault:
        return None, [f"{where} {fault}"]
    except UnicodeDecodeError:
        return None, [f"{where} is not UTF-8 text"]
    if source is None:
        return None, []
    if not isinstance(source, str):
        return None, [f"{where} chat_template must be text, not {quote(source)}"]
    if len(source) > MAX_TEMPLATE:
        return None, [f"{where} chat_template is longer than {MAX_TEMPLATE} characters"]
    broken = template_fault(source)
    return source, [f"{where} chat_template is broken: {broken}"] if broken else []


def _default(template: object) -> object:
    """Several named templates may be stored; the one called default is meant."""
    if not isinstance(template, list):
        return template
    for one in template:
        if isinstance(one, dict) and one.get("name") == "default":
            return one.get("template")
    return template or None


def template_fault(source: str) -> str | None:
    """What the template language refuses in `source`; nothing of it is executed."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        env.compile(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        return quote(str(error.message)) + (f" in line {line}" if line else "")
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError):
        return "it is nested too deeply"
    return None
