"""What the routes share: the door, the model behind it, and the answers under way.

Decides who may come in now. While the model loads, while the server drains and after the engine has
failed, that is nobody.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Protocol

import headrace
from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.config.schema import ServerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live.generate import TextEngine
from headrace.live.traffic import EngineTraffic, Facts, TrafficRecorder
from headrace.models.text.template import ChatTemplate
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.callers import Tenants
from headrace.server.delivery import Delivery
from headrace.server.metrics import Metrics
from headrace.server.prompts import PromptMaker
from headrace.server.tokens import TokenStrings

RETRY_AFTER_S = 2.0


class Door(StrEnum):
    LOADING = "loading"
    WAITING = "waiting"  # who comes is let in, and waits for somebody who computes
    OPEN = "open"
    DRAINING = "draining"
    FAILED = "failed"


class Answerer(Protocol):
    """A model that has been booted, in this process or in others."""

    @property
    def name(self) -> str:
        """That clients use."""
        ...

    @property
    def text_engine(self) -> TextEngine: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def identity(self) -> str:
        """Changes with everything that may change the tokens of an answer, the program apart."""
        ...

    def facts(self) -> Facts:
        """For a recording of its traffic."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A model that answers."""

    name: str
    text_engine: TextEngine
    prompts: PromptMaker
    tokens: TokenStrings
    created_s: int  # Unix time
    fingerprint: str  # changes with everything that may change an answer's bytes

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_engine.tokenizer


class Service:
    """One server's state. Belongs to one event loop, except for what says otherwise."""

    def __init__(
        self,
        config: ServerConfig,
        telemetry: TelemetryConfig,
        recorder: TrafficRecorder | None = None,
    ) -> None:
        self.config = config
        self._recorder = recorder
        self.metrics = Metrics(telemetry)
        self.tenants = Tenants()
        self._served: Served | None = None
        # Workers, in words, while the model loads; empty = for none. Any thread may say so.
        self.waits_for = ""
        self._is_draining = False
        self._is_spoken_to = False  # whether the engine speaks in the loop that serves
        self._deliveries: set[Delivery] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def attach(self, answerer: Answerer) -> None:
        """Open the door: the model is there. Once."""
        text_engine = answerer.text_engine
        traffic = None
        if self._recorder is not None:
            self._recorder.begin(answerer.facts())
            traffic = EngineTraffic(self._recorder)
        self.metrics.attach(text_engine.engine, answerer.name, traffic)
        self._served = Served(
            name=answerer.name,
            text_engine=text_engine,
            prompts=PromptMaker(
                text_engine.tokenizer,
                answerer.chat_template,
                vocab_size=text_engine.vocab_size,
                max_model_len=text_engine.max_model_len,
                special_tokens_in_content=self.config.special_tokens_in_content,
            ),
            tokens=TokenStrings(text_engine.tokenizer),
            created_s=int(time.time()),
            fingerprint=_fingerprint(answerer, self.config),
        )

    @property
    def door(self) -> Door:
        if self._served is None:
            return Door.DRAINING if self._is_draining else Door.LOADING
        if self._served.text_engine.engine.failure is not None:
            return Door.FAILED
        return Door.DRAINING if self._is_draining else Door.OPEN

    def readiness(self) -> tuple[Door, str]:
        """The door, or that nobody is behind it, and what an operator should know of that; empty =
        nothing. Anything but OPEN says: ask another server, if there is one.
        """
        door = self.door
        if door is Door.LOADING and self.waits_for:
            return door, f"waiting for workers: {self.waits_for}"
        if door is Door.OPEN and self._served is not None:
            absence = self._served.text_engine.engine.absence()
            return (Door.WAITING, absence) if absence else (door, "")
        return door, ""

    def enter(self) -> Served:
        """The model, for a request that may come in; else OverloadError 503."""
        door = self.door
        if door is not Door.OPEN or self._served is None:
            raise OverloadError(self._closed(door), retry_after_s=RETRY_AFTER_S)
        return self._served

    def _closed(self, door: Door) -> str:
        """What a client hears. Which workers there are is for the operator."""
        is_waiting = door is Door.LOADING and self.waits_for
        return "the server is waiting for its workers" if is_waiting else _CLOSED[door]

    def model(self, name: str | None) -> Served:
        """The model that a request names; no name means the one there is. RequestError 404."""
        served = self.enter()
        if name and name != served.name:
            raise RequestError(
                "no such model",
                status_hint=404,
                code="model_not_found",
                param="model",
                model=name[:100],
                hint=f"this server has `{served.name}`",
            )
        return served

    # ---- answers under way

    def begin(self, delivery: Delivery) -> None:
        if self._served is not None and not self._is_spoken_to:
            self._is_spoken_to = True
            self._served.text_engine.speak_in(asyncio.get_running_loop())
        self._deliveries.add(delivery)
        self._is_idle.clear()

    async def end(self, delivery: Delivery, engine_ids: Sequence[str] = ()) -> None:
        """Let go of an answer, sent or not; the engine has been told before this returns.

        `engine_ids` are those of the requests that the engine had for it.
        """
        wait = delivery.client_wait()
        await delivery.aclose()
        self.metrics.leave(engine_ids, wait)
        self._deliveries.discard(delivery)
        if not self._deliveries:
            self._is_idle.set()

    @property
    def num_deliveries(self) -> int:
        return len(self._deliveries)

    def begin_drain(self) -> None:
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Close the door, wait for the answers under way, then end those that are left with an
        error.

        Returns whether all could finish.
        """
        self.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        left = list(self._deliveries)
        for delivery in left:
            error = OverloadError(_CLOSED[Door.DRAINING], retry_after_s=RETRY_AFTER_S)
            delivery.fail(error)
        return not left

    def close(self) -> None:
        if self._served is not None:
            self._served.prompts.close()


def _fingerprint(answerer: Answerer, config: ServerConfig) -> str:
    template = answerer.chat_template
    identity = [
        headrace.__version__,
        answerer.identity,
        answerer.text_engine.tokenizer.digest(),
        "" if template is None else template.digest,
        str(config.special_tokens_in_content),
    ]
    return f"fp_{sha256(' '.join(identity).encode()).hexdigest()[:12]}"


_CLOSED = {
    Door.LOADING: "the model is still loading",
    Door.DRAINING: "the server is shutting down",
    Door.FAILED: "the engine has failed; the server must be restarted",
    Door.WAITING: "",
    Door.OPEN: "",
}
