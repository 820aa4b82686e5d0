"""What a gateway remembers of the models that its engines show."""

import asyncio

from msgspec import Raw

from headrace.cluster.gateway.gateway import Gateway
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
