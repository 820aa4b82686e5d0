"""KV events of all engines that publish some, and the names that prompts then have.

Decides which requests are named by tokens: all, once one engine publishes what it has cached.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cluster.gateway.ask import Ask
from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.kv_cache import EngineCache
from headrace.cluster.gateway.switch import Switch
from headrace.cluster.gateway.tokens import TokenNames
from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import Config
from headrace.live.boot import template_path

if TYPE_CHECKING:
    from headrace.cluster.gateway.kv_feed import KvFeed


class _Card(msgspec.Struct):
    parent: str | None = None  # of an adapter: the model that it adapts


class KvSources:
    """Empty where no engine publishes any."""

    def __init__(self, config: Config, engines: Sequence[Engine], switch: Switch) -> None:
        """ConfigError where the tokenizer cannot be read, or nobody would use it."""
        self.caches = {one.name: EngineCache(one, switch) for one in engines if _publishes(one)}
        self.feeds: list[KvFeed] = []
        self._adapters: set[str] = set()
        self._tokens: TokenNames | None = None
        file = config.cluster.engine_tokenizer
        if not self.caches:
            if file:
                raise ConfigError(
                    "a tokenizer of engines is named, but no engine publishes KV events",
                    hint="give an engine its feed: --engine URL,kv-events=tcp://HOST:PORT",
                )
            return
        # It needs ZeroMQ, which those who have no feeds do not.
        from headrace.cluster.gateway import kv_feed

        self._tokens = TokenNames(
            Path(file).expanduser() if file else None, template_path(config.model)
        )
        for engine in filter(_publishes, engines):
            address, cache = engine.address, self.caches[engine.name]
            feed = kv_feed.KvFeed(engine.name, address.kv_events, address.kv_replay, cache)
            self.feeds.append(feed)

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()

    def learn(self, cards: Mapping[str, msgspec.Raw]) -> None:
        """Which models are adapters, from what engines show of them all."""
        if self.caches:
            self._adapters = {name for name, card in cards.items() if _is_adapter(card)}

    def came_up(self, engine: Engine) -> None:
        if cache := self.caches.get(engine.name):
            cache.came_up()

    async def named(self, ask: Ask, path: str, body: bytes) -> Ask:
        if self._tokens is None:
            return ask
        return await self._tokens.name(ask, path, body, is_adapter=ask.model in self._adapters)


def _is_adapter(card: msgspec.Raw) -> bool:
    try:
        return msgspec.json.decode(card, type=_Card).parent is not None
    except msgspec.DecodeError:
        return False


def _publishes(engine: Engine) -> bool:
    return bool(engine.address.kv_events)
