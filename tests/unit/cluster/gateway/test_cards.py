"""What a gateway remembers of the models that its engines show."""

import asyncio

import pytest
from msgspec import Raw

from headrace.cluster.gateway.gateway import Gateway
from headrace.cluster.gateway.watch import Sick, read_cards
from headrace.core.config.merge import from_settings


def test_models_that_no_engine_has_any_more_are_forgotten() -> None:
    """An engine may show others with each look."""

    async def look() -> None:
        gateway = Gateway(from_settings({"engines": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}))
        first, second = gateway.engines
        gateway.came_up(second, {"b": Raw(b'"b"')})
        gateway.went_down(second, "for now")
        for number in range(100):
            gateway.came_up(first, {f"m{number}": Raw(b'"%d"' % number), "a": Raw(b'"a"')})
        assert [bytes(card) for card in gateway.cards()] == [b'"99"', b'"a"']
        assert gateway.card("m0") is None
        assert gateway._cards.keys() == {"a", "b", "m99"}
        gateway.came_up(second, {"b": Raw(b'"c"')})
        assert bytes(gateway.card("b") or b"") == b'"c"'

    asyncio.run(look())


def test_an_engine_with_a_name_that_is_none_is_sick() -> None:
    assert read_cards(b'{"data": [{"id": "a", "x": 1}]}') == {"a": Raw(b'{"id": "a", "x": 1}')}
    for name in (b"\\u0000", b"a\\nb", b"\\u009b"):
        with pytest.raises(Sick, match="the name of a model has the control character"):
            read_cards(b'{"data": [{"id": "good"}, {"id": "%s"}]}' % name)
