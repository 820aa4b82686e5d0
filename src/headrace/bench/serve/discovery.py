"""What a server says of itself before it is loaded, and whether it answers at all."""

from typing import TYPE_CHECKING

import msgspec

from headrace.bench.client import connect, now
from headrace.bench.serve.asked import Target
from headrace.bench.serve.asker import Asker
from headrace.bench.serve.wording import Wording
from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 30.0
GONE_S = 10.0  # within which a server that is only busy says something
PROBE_TOKENS = 16


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None  # as vLLM tells it


class _Cards(msgspec.Struct, frozen=True):
    data: list[ModelCard]


async def find_model(target: Target) -> ModelCard:
    """The model that is asked for, or the first one that is listed. Raises ConfigError where none
    is named and none is listed.
    """
    async with connect(timeout_s=TIMEOUT_S) as session:
        cards, trouble = await _listed(session, target)
    if not target.model:
        if not cards:
            raise ConfigError(
                f"{target.url}/v1/models lists no model{trouble}",
                hint="--url is the server's address, --model the name to ask for",
            )
        return cards[0]
    return next((one for one in cards if one.id == target.model), ModelCard(target.model))


async def _listed(session: "aiohttp.ClientSession", target: Target) -> tuple[list[ModelCard], str]:
    """Models, or why there are none."""
    import aiohttp

    try:
        async with session.get(
            f"{target.url}/v1/models", headers=target.headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                return [], f": status {response.status}"
            return msgspec.json.decode(await response.read(), type=_Cards).data, ""
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        return [], f": {str(error) or 'no answer in time'}"


async def is_gone(target: Target) -> bool:
    """Whether nobody answers at the address any more. A refusal is an answer."""
    import aiohttp

    async with connect(timeout_s=GONE_S) as session:
        try:
            async with session.get(
                f"{target.url}/v1/models", headers=target.headers, allow_redirects=False
            ):
                return False
        except (aiohttp.ClientError, OSError, TimeoutError):
            return True


async def probe(target: Target, wording: Wording) -> None:
    """One short request, so that what is wrong is said before a load is offered. Raises
    HeadraceError.
    """
    spec = SeqSpec(
        seq_id=SeqId(0),
        request_id="probe",
        prompt_tokens=tuple(range(PROBE_TOKENS)),
        params=SamplingParams(max_tokens=2),
    )
    async with connect(timeout_s=target.timeout_s) as session:
        asker = Asker(session, target, wording, now())
        outcome, _ = await asker.ask(spec, asker.payload(spec), Ns(0))
    if outcome.fault:
        raise HeadraceError(
            f"the server does not answer as it should: {outcome.detail}",
            hint="--endpoint, --model and --extra-body say how it is asked, --no-usage that it is "
            "not asked for usage",
        )
