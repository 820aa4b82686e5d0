"""Spans become requests: those of a model, once each, whatever holds them."""

import json
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.workload.traces import kind_of, parse_trace

START_NS = 1_700_000_000_000_000_000


def attribute(key: str, value: Any) -> dict[str, Any]:
    kind = "stringValue" if isinstance(value, str) else "intValue"
    # OTLP's JSON writes 64-bit integers as strings; some exporters write numbers.
    return {"key": key, "value": {kind: str(value) if kind == "intValue" and value % 2 else value}}


def span(at_s: float, prompt: int, output: int, **others: Any) -> dict[str, Any]:
    usage = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
    attributes = others.pop("attributes", usage | {"gen_ai.operation.name": "chat"})
    return {
        "name": "chat a-model",
        "spanId": f"{at_s:016}",
        "startTimeUnixNano": str(START_NS + round(at_s * 1e9)),
        "endTimeUnixNano": str(START_NS + round(at_s * 1e9) + 1),
        "attributes": [attribute(key, value) for key, value in attributes.items()],
        **others,
    }


def export(*spans: dict[str, Any]) -> str:
    scopes = [{"scope": {"name": "x"}, "spans": list(spans)}]
    return json.dumps({"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": scopes}]})


def read(*lines: str) -> list[tuple[float, int, int]]:
    found = parse_trace(lines)
    return [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in found]


def test_spans_are_requests_in_the_order_of_their_start() -> None:
    lines = export(span(3.5, 101, 20), span(1.0, 50, 7)), "", export(span(2.25, 60, 9))
    assert kind_of(lines[0]) == "otel"
    assert read(*lines) == [(0.0, 50, 7), (1.25, 60, 9), (2.5, 101, 20)]


def test_the_older_names_are_understood() -> None:
    usage = {"gen_ai.usage.prompt_tokens": 11, "gen_ai.usage.completion_tokens": 4}
    assert read(export(span(0.0, 0, 0, attributes=usage))) == [(0.0, 11, 4)]


def test_what_is_no_request_is_left_out() -> None:
    whole = {"gen_ai.usage.input_tokens": 900, "gen_ai.usage.output_tokens": 90}
    lines = export(
        span(0.0, 5, 5),
        span(1.0, 5, 0),  # failed before its first token
        span(2.0, 5, 5, status={"code": 2}),
        span(3.0, 5, 5, status={"code": "STATUS_CODE_ERROR"}),
        span(4.0, 0, 0, attributes={"http.route": "/v1/models"}),
        span(5.0, 0, 0, attributes=whole | {"gen_ai.operation.name": "invoke_agent"}),
        span(6.0, 0, 0, attributes=whole | {"gen_ai.operation.name": "embeddings"}),
        span(7.0, 8, 8, status={"code": 1}),
    )
    assert read(lines) == [(0.0, 5, 5), (7.0, 8, 8)]


def test_a_span_that_sums_its_children_is_not_counted_beside_them() -> None:
    """As where both a gateway and the engine behind it tell the usage of one request."""
    outer = span(0.0, 30, 6)
    inner = span(1.0, 30, 6, parentSpanId=outer["spanId"])
    lonely = span(2.0, 9, 9, parentSpanId="of a span that is not here")
    assert read(export(inner, lonely), export(outer)) == [(0.0, 30, 6), (1.0, 9, 9)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"resourceSpans": [', "line 2 of the trace holds no spans"),
        ('{"resourceSpans": 5}', "line 2 of the trace holds no spans"),
        (export(span(0.0, 1, 1, startTimeUnixNano="soon")), "invalid literal"),
    ],
)
def test_a_wrong_line_is_named(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(export(span(0.0, 5, 5)), line)


def test_no_requests_are_said() -> None:
    with pytest.raises(ConfigError, match="holds no requests"):
        read(export())
