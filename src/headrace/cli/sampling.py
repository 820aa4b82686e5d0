"""The flags that say how tokens are chosen."""

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Group, Parameter

_GROUP = Group("Sampling", sort_key=5)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Names and meanings are the API's; so are the bounds, which the engine checks."""

    temperature: Annotated[float, Parameter(help="0 = always the likeliest token")] = 0.7
    top_p: Annotated[float, Parameter(help="least share of likelihood to choose from")] = 1.0
    top_k: Annotated[int, Parameter(help="most tokens to choose from; 0 = all")] = 0
    min_p: Annotated[float, Parameter(help="least likelihood, as a share of the best")] = 0.0
    repetition_penalty: Annotated[float, Parameter(help="above 1 = less repetition")] = 1.0
    seed: Annotated[
        int | None, Parameter(help="same seed, same answer; none = another each time")
    ] = None
    max_tokens: Annotated[
        int | None, Parameter(help="most tokens of an answer; none = until it ends")
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            help="text that ends the answer; may be repeated", negative="", show_default=False
        ),
    ] = field(default=())
