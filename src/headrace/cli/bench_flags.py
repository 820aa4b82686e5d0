"""The flags of `headrace bench`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from headrace.cli.flags import Json

_LOADS = Group("Loads", sort_key=5)
_OUTPUT = Group("Output", sort_key=6)


@Parameter(name="*", group=_LOADS)
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Which loads are offered, and how."""

    load: Annotated[
        tuple[str, ...],
        Parameter(
            help="single, batch, shared, shared_cold or prefill; may be repeated; none = all",
            negative="",
            show_default=False,
        ),
    ] = ()
    model: Annotated[
        str | None, Parameter(help="model name to ask for; none = the first that is listed")
    ] = None
    tokenizer: Annotated[
        str | None, Parameter(help="model file whose tokens are counted; none = the default model")
    ] = None
    seed: Annotated[int, Parameter(help="another seed, other prompts")] = 1
    rounds: Annotated[int, Parameter(help="of each load, where servers are compared")] = 3
    timeout_s: Annotated[
        float, Parameter(help="after which a server is held not to end a load; others go on")
    ] = 600.0
    extra: Annotated[
        tuple[str, ...],
        Parameter(
            help="JSON that goes into every request; again for a further server that wants other",
            negative="",
        ),
    ] = ('{"ignore_eos": true}',)


@Parameter(name="*", group=_OUTPUT)
@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where figures go."""

    json: Json = False
    out: Annotated[
        str | None, Parameter(help="file that the JSON is written to, too", show_default=False)
    ] = None
