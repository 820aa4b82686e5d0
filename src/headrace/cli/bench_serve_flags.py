"""The flags of `headrace bench serve`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from headrace.cli.flags import Json

_SERVER = Group("Server", sort_key=1)
_TRAFFIC = Group("Traffic", sort_key=2)
_JUDGED = Group("Limits", sort_key=3)
_OUTPUT = Group("Output", sort_key=4)


def _flag(text: str) -> Parameter:
    return Parameter(help=text, show_default=False)


@Parameter(name="*", group=_SERVER)
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Who is asked, and how."""

    endpoint: Annotated[str, Parameter(help="chat or completions")] = "chat"
    model: Annotated[str, _flag("name to ask for; none = the first that is listed")] = ""
    api_key: Annotated[str, _flag("none = $OPENAI_API_KEY, if there is one")] = ""
    extra_body: Annotated[str, Parameter(help="JSON that goes into every request")] = (
        '{"ignore_eos": true}'
    )
    usage: Annotated[bool, Parameter(help="ask for token counts at the end of streams")] = True
    new_connections: Annotated[
        bool, Parameter(help="one for each request, which its TTFT then has too", negative="")
    ] = False
    timeout_s: Annotated[float, Parameter(help="for a whole answer")] = 600.0
    max_in_flight: Annotated[int, Parameter(help="requests beyond wait, and are late")] = 4096
    metrics: Annotated[str, _flag("address of its metrics; none = URL/metrics")] = ""
    tokenizer: Annotated[
        str | None,
        _flag("model file: prompts then have exactly as many of its tokens as are asked"),
    ] = None


@Parameter(name="*", group=_TRAFFIC)
@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """Which requests there are, and when they come."""

    workload: Annotated[str, Parameter(help="chat, agent or rag")] = "chat"
    trace: Annotated[
        str | None,
        _flag("file of a published trace (Mooncake, Bailian, Azure, BurstGPT) instead"),
    ] = None
    speed: Annotated[float, Parameter(help="of the trace; 2 = all comes in half the time")] = 1.0
    requests: Annotated[
        int | None, _flag("how many; 200, or all of a trace, or as many as --duration-s has")
    ] = None
    duration_s: Annotated[float | None, _flag("seconds after which none is sent")] = None
    rate: Annotated[float | None, _flag("requests per second, at times of their own")] = None
    burstiness: Annotated[
        float, Parameter(help="squared variation of gaps; 1 = Poisson, 0 = even")
    ] = 1.0
    ramp: Annotated[
        str | None, _flag("a rate that changes: 0:1,60:10 = from 1/s to 10/s within a minute")
    ] = None
    concurrency: Annotated[int | None, _flag("clients who each wait for their answer")] = None
    think_s: Annotated[
        float | None,
        _flag("mean pause after an answer; none = the workload's, or 0 with --concurrency"),
    ] = None
    burst: Annotated[bool, Parameter(help="all requests at once", negative="")] = False
    prompt: Annotated[int | None, _flag("mean prompt tokens, history included")] = None
    output: Annotated[int | None, _flag("mean output tokens")] = None
    turns: Annotated[int | None, _flag("requests of a session; none = the workload's")] = None
    length_scale: Annotated[
        float, Parameter(help="of all lengths; 0.1 = prompts and answers a tenth as long")
    ] = 1.0
    max_length: Annotated[
        int | None, _flag("most tokens of prompt and answer; none = what the server lists")
    ] = None
    seed: Annotated[int | None, _flag("none = another each time, so that no cache knows it")] = None


@Parameter(name="*", group=_JUDGED)
@dataclass(frozen=True, kw_only=True)
class JudgeFlags:
    """When a request is good, and a run is one."""

    ttft_ms: Annotated[float | None, _flag("limit; none = the workload's")] = None
    tpot_ms: Annotated[float | None, _flag("limit; likewise")] = None
    itl_ms: Annotated[float | None, _flag("limit of every gap")] = None
    e2e_ms: Annotated[float | None, _flag("limit; none = the workload's")] = None
    warm_up_s: Annotated[float, Parameter(help="seconds whose requests are not counted")] = 0.0
    max_lag_ms: Annotated[
        float, Parameter(help="p99 of the send lag beyond which a run is no measurement")
    ] = 50.0
    search: Annotated[
        str | None, _flag("rate or concurrency: find the highest that keeps the limits")
    ] = None
    attainment: Annotated[float, Parameter(help="share of good requests that is demanded")] = 0.9
    trials: Annotated[int, Parameter(help="most runs of a search")] = 12


@Parameter(name="*", group=_OUTPUT)
@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Where figures go."""

    json: Json = False
    out: Annotated[str | None, _flag("file for the JSON")] = None
    csv: Annotated[str | None, _flag("file for a line of each request")] = None
    html: Annotated[str | None, _flag("file for a page with charts")] = None
