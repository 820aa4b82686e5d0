"""Chat templates: a conversation to the text that a model was trained on, by sandboxed Jinja.

A template comes with a model file and is not trusted: it cannot reach Python's objects (Jinja's
sandbox), its loops and calls together are counted, and texts that it builds are bounded. What Jinja
dialect it may use follows the `transformers` library, so that templates written for that render the
same.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import jinja2
from jinja2 import nodes, parser
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.core.base.errors import ConfigError, RequestError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_STEPS = 200_000  # loop turns and calls of one rendering

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Names that a client's own template arguments may not take."""

# Formats whose width is large, or comes from an argument.
_WIDE = re.compile(r"\d{5,}|%[-+ #0]*\*|\.\*|:[^{}]*\{")

_steps_left: ContextVar[int] = ContextVar("_steps_left")


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """ConfigError where the source is not a template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ConfigError(
                f"the chat template cannot be compiled: {error}",
                hint="name another with model.chat_template",
            ) from None
        self._names = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. RequestError where the template refuses the messages, fails on them, or
        exceeds its bounds.
        """
        taken = RESERVED & kwargs.keys()
        if taken:
            raise RequestError(
                f"{min(taken)!r} is not a free name of the chat template",
                param="chat_template_kwargs",
            )
        token = _steps_left.set(MAX_STEPS)
        try:
            return self._rendered(
                kwargs
                | self._names
                | {
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _Refused as error:
            raise RequestError(str(error), param="messages", code="chat_template") from None
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _failure(error) from None
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise _failure(error) from None
        finally:
            _steps_left.reset(token)

    def _rendered(self, names: dict[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(names):
            length += len(part)
            if length > MAX_OUTPUT_CHARS:
                raise SecurityError(f"the output exceeds {MAX_OUTPUT_CHARS} characters")
            parts.append(part)
        return "".join(parts)


def _failure(error: BaseException) -> RequestError:
    return RequestError(
        f"the chat template failed on these messages: {error}",
        param="messages",
        code="chat_template",
    )


class _Refused(Exception):
    """The template itself says that the messages do not suit it."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _count_step() -> None:
    left = _steps_left.get(MAX_STEPS) - 1
    if left < 0:
        raise SecurityError(f"more than {MAX_STEPS} loop turns and calls")
    _steps_left.set(left)


def _bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_OUTPUT_CHARS:
        raise SecurityError(f"a text of more than {MAX_OUTPUT_CHARS} characters")
    return value


def _counted(items: Any) -> Iterator[Any]:
    for item in items:
        _count_step()
        yield item


def _joined(*parts: Any) -> str:
    """The operator `~`."""
    return str(_bounded("".join(map(str, parts))))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this escapes nothing for HTML."""
    if indent is not None and not 0 <= indent <= 64:
        raise SecurityError(f"an indent of {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own interface

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop, call and growing text counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not offered")
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not offered")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _count_step()
        of_text = isinstance(getattr(function, "__self__", None), str)
        if of_text and any(isinstance(arg, int) and arg > MAX_STEPS for arg in args):
            raise SecurityError("a text that is too long")
        return _bounded(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise SecurityError("a format that pads")
        return wrapped


def _check_repetition(sequence: Any, count: Any) -> None:
    repeats = isinstance(sequence, str | list | tuple) and isinstance(count, int)
    if repeats and len(sequence) * count > MAX_STEPS:
        raise SecurityError("a repetition that is too long")


def _format(format: str, *args: Any) -> str:
    if _WIDE.search(format):
        raise SecurityError("a format that pads")
    return format % args


class _Counting(NodeTransformer):
    """Puts counted forms in the place of loops and of the operator `~`, which the sandbox does not
    see.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted", [])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return _filtered(first, "_joined", rest)


def _filtered(value: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, value), name, args, [], None, None, lineno=value.lineno)


_ENVIRONMENT = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.filters |= {
    "tojson": _tojson,
    "format": _format,
    "_counted": _counted,
    "_joined": _joined,
}
# Chance has no place in a prompt, and these build texts of any size from nothing.
del _ENVIRONMENT.globals["lipsum"]
for _name in ("batch", "center", "random", "slice"):
    del _ENVIRONMENT.filters[_name]
