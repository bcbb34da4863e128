"""Runs a chat template in a sandbox with limits on time, loops and the size of any text."""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clover_compile.runtime.errors import TemplateFailed

MAX_OUTPUT = 4 * 1024 * 1024
"""Most UTF-8 bytes a template may write, and most characters of any text on the way."""

MAX_STEPS = 300_000
"""Most turns of loops, calls and filters together."""

MAX_SECONDS = 10.0
"""Longest rendering; looked at between steps, none of which can be long."""

# Widths of six digits and more, or given by an argument, in either style of format.
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{6}|[*])")
_WIDE_FIELD = re.compile(r"\{[^{}]*[0-9]{6}")
_LOOKS_AT_KIND = re.compile(r"\bis\s+(?:not\s+)?(?:string|iterable|sequence|mapping)\b")


class Template:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Raises TemplateFailed if the source does not compile."""
        self.source = source
        # Without such a question the template would print a list of parts as a Python literal.
        self.takes_parts = _LOOKS_AT_KIND.search(source) is not None
        self.takes_tools = re.search(r"\btools\b", source) is not None
        self._env = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,
        )
        self._env.filters["tojson"] = _tojson
        for name, function in self._env.filters.items():
            self._env.filters[name] = _limited(self._env, name, function)
        # Random filler text, as long as its argument says: no prompt needs it.
        del self._env.globals["lipsum"]
        self._env.globals["raise_exception"] = _raise_exception
        self._env.globals["strftime_now"] = _strftime_now
        try:
            self._template = self._env.from_string(source)
        except Exception as error:  # the compiler meets arbitrary text
            raise TemplateFailed(reason=one_ascii_line(error)) from error

    def render(self, **values: Any) -> str:
        """The text the template writes; raises TemplateFailed for any fault in it."""
        self._env.spent.reset()
        parts, size = [], 0
        try:
            for part in self._template.generate(**values):
                size += len(part.encode("utf-8", "surrogatepass"))
                if size > MAX_OUTPUT:
                    raise TemplateFailed(reason=f"it writes more than {MAX_OUTPUT} bytes")
                parts.append(part)
        except TemplateFailed:
            raise
        except Exception as error:  # a template can raise anything an expression can
            raise TemplateFailed(reason=one_ascii_line(error)) from error
        return "".join(parts)


class _Generation(Extension):
    """`{% generation %}` marks what training learns; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Code(CodeGenerator):
    """Counts the turns of loops, and lets `~` pass the environment's own limit on text."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")


class _Spent(threading.local):
    """What the rendering in progress has used, by thread: sessions may run at once."""

    steps = 0
    start = 0.0

    def reset(self) -> None:
        self.steps, self.start = 0, time.monotonic()


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses the usual ways to fill the memory or to run for ever."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        self.spent = _Spent()
        super().__init__(**options)

    def step(self) -> None:
        """Counts one turn; raises TemplateError when steps or time are used up."""
        self.spent.steps += 1
        late = time.monotonic() - self.spent.start > MAX_SECONDS
        if late or self.spent.steps > MAX_STEPS:
            raise jinja2.TemplateError("it runs too long")

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joined parts; raises TemplateError if they are too long."""
        kept = list(parts)
        if sum(map(len, kept)) > MAX_OUTPUT:
            raise jinja2.TemplateError("a text grows too large")
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
        power = operator == "**" and max(numbers, default=0) > 1 << 16
        power = power or any(x.bit_length() > 1 << 16 for x in numbers)
        times = operator == "*" and sum(sizes) * max(numbers, default=0) > MAX_OUTPUT
        wide = operator == "%" and isinstance(left, str) and _WIDE.search(left) is not None
        if power or times or wide or (operator == "+" and sum(sizes) > MAX_OUTPUT):
            raise jinja2.TemplateError(f"the operation {operator} makes too large a value")
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step()
        _check_arguments(args, kwargs)
        # The sandbox wraps `format` of a string.
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _check_growth(getattr(method, "__name__", ""), owner, args)
        return _checked(super().call(context, obj, *args, **kwargs))


def _limited(env: _Sandbox, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose calls are counted and whose arguments and result are checked."""
    # A filter that is handed the context or the environment gets it before its value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def limited(*args: Any, **kwargs: Any) -> Any:
        env.step()
        passed, value, rest = args[:first], args[first], args[first + 1 :]
        _check_arguments(rest, kwargs)
        if name == "join":
            separator = str((*rest, kwargs.get("d", ""))[0])
            value = _check_growth(name, separator, (value,))[0]
        elif name in ("replace", "format"):
            _check_growth(name, str(value), rest)
        return _checked(function(*passed, value, *rest, **kwargs))

    for key, value in getattr(function, "__dict__", {}).items():
        setattr(limited, key, value)
    return limited


def _check_growth(name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuses the text functions that could make far more than they are given.

    Returns the arguments; those that can be read only once are lists then.
    """
    size = 0
    if name == "replace" and len(args) > 1:
        size = len(text) + text.count(str(args[0])) * len(str(args[1]))
    elif name == "join" and args:
        parts = list(args[0])
        size = sum(len(x) if isinstance(x, str) else 1 for x in parts) + len(parts) * len(text)
        args = (parts, *args[1:])
    elif name == "format" and (_WIDE.search(text) or _WIDE_FIELD.search(text)):
        size = MAX_OUTPUT + 1
    if size > MAX_OUTPUT:
        raise jinja2.TemplateError("a text grows too large")
    return args


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A width is the one argument with which a small call makes a large value."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_OUTPUT:
            raise jinja2.TemplateError(f"the argument {value} is too large")


def _checked(value: Any) -> Any:
    # What doubles again and again is stopped here before it is large.
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_OUTPUT:
        raise jinja2.TemplateError("a value grows too large")
    return value


def one_ascii_line(error: object) -> str:
    """An error's words on one short printable line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode("ascii", "backslashreplace").decode()[:200]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
