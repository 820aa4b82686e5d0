"""The Jinja dialect of chat templates, and the sandbox that keeps a template from Python's objects.

The dialect follows the `transformers` library, so that templates written for that render the same.
Time and memory are not bounded here: whoever runs a template that a stranger wrote does so in a
process that can be ended (`template_worker`).
"""

import json
from typing import Any

from jinja2 import nodes, parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(Exception):
    """The template itself says that the messages do not suit it."""


class Sandbox:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """jinja2.TemplateError, SyntaxError or RecursionError where the source is not a
        template.
        """
        self._template = _ENVIRONMENT.from_string(source)

    def render(self, names: dict[str, Any], max_chars: int) -> str:
        """The text. Refused by the template's own will, ValueError where the text is longer than
        `max_chars`, and whatever else a template can raise.
        """
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(names):
            num_chars += len(part)
            if num_chars > max_chars:
                raise ValueError(f"the text is longer than {max_chars} characters")
            parts.append(part)
        return "".join(parts)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this escapes nothing for HTML."""
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


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.filters["tojson"] = _tojson
# Chance has no place in a prompt.
del _ENVIRONMENT.globals["lipsum"]
del _ENVIRONMENT.filters["random"]
