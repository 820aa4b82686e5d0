"""Requests out of OpenTelemetry spans: OTLP in JSON, as the collector's file exporter writes it.

Decides which spans are requests to a model (semantic conventions for generative AI, and the names
that vLLM gives); refuses to know where lines come from.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError

# The names of the conventions first, then those that went before, which vLLM has kept.
_PROMPT_KEYS: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT_KEYS: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_OPERATION_KEY: Final = "gen_ai.operation.name"
# Operations that hold requests, and sum their usage, or that produce no tokens.
_OTHER_OPERATIONS: Final = frozenset(
    {"invoke_agent", "create_agent", "execute_tool", "invoke_workflow", "embeddings"}
)
_ERROR_CODES: Final = (2, "STATUS_CODE_ERROR")


class _Value(msgspec.Struct, frozen=True, rename="camel"):
    int_value: int | str | None = None  # 64-bit integers are strings in OTLP's JSON
    double_value: float | None = None
    string_value: str | None = None


class _Attribute(msgspec.Struct, frozen=True):
    key: str
    value: _Value = _Value()


class _Status(msgspec.Struct, frozen=True):
    code: int | str = 0


class _Span(msgspec.Struct, frozen=True, rename="camel"):
    span_id: str = ""
    parent_span_id: str = ""
    start_time_unix_nano: int | str = 0
    attributes: tuple[_Attribute, ...] = ()
    status: _Status = _Status()


class _ScopeSpans(msgspec.Struct, frozen=True):
    spans: tuple[_Span, ...] = ()


class _ResourceSpans(msgspec.Struct, frozen=True, rename="camel"):
    scope_spans: tuple[_ScopeSpans, ...] = ()


class _Export(msgspec.Struct, frozen=True, rename="camel"):
    resource_spans: tuple[_ResourceSpans, ...] = ()


class SpanRequest(msgspec.Struct, frozen=True):
    start_ns: int  # since 1970
    prompt_tokens: int
    output_tokens: int


def is_otlp(head: str) -> bool:
    """Whether a file that begins with this line holds spans."""
    return '"resourceSpans"' in head


def parse_spans(lines: Iterable[str]) -> Iterator[tuple[int, SpanRequest]]:
    """Requests with the number of their line, in the order in which they stand there.

    Failed requests and those without output are left out, and so is a span whose children are
    requests. Raises ConfigError that names the line.
    """
    found: list[tuple[int, _Span, SpanRequest]] = []
    decoder = msgspec.json.Decoder(_Export)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                export = decoder.decode(line)
                spans = [
                    span
                    for resource in export.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
                found += [(number, span, asked) for span in spans if (asked := _request(span))]
            except (msgspec.MsgspecError, ValueError) as error:
                raise ConfigError(
                    f"line {number} of the trace holds no spans: {error}",
                    hint="expected OTLP in JSON, one export a line: the collector's file exporter",
                ) from error
    parents = {span.parent_span_id for _, span, _ in found}
    for number, span, asked in found:
        if not span.span_id or span.span_id not in parents:
            yield number, asked


def _request(span: _Span) -> SpanRequest | None:
    values = {attribute.key: attribute.value for attribute in span.attributes}
    prompt, output = _number(values, _PROMPT_KEYS), _number(values, _OUTPUT_KEYS)
    operation = values.get(_OPERATION_KEY, _Value()).string_value
    has_failed = span.status.code in _ERROR_CODES
    if not (prompt and output) or has_failed or operation in _OTHER_OPERATIONS:
        return None
    return SpanRequest(int(span.start_time_unix_nano), prompt, output)


def _number(values: dict[str, _Value], keys: Iterable[str]) -> int:
    """0 where there is none. ValueError where it is no number."""
    for key in keys:
        if key in values:
            value = values[key]
            return int(value.int_value if value.int_value is not None else value.double_value or 0)
    return 0
