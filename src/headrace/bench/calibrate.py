"""A calibration: a server of its own under a bounded load, and what its logs and clients tell.

Decides what is asked of the server so that steps of all kinds are seen; refuses to know how times
become a cost model.
"""

import asyncio
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean

from headrace import __version__
from headrace.bench.client import Answer
from headrace.bench.loads import Target, warm_up
from headrace.bench.machine import machine
from headrace.bench.offered import Ask, offer_rounds
from headrace.bench.prompts import PromptWriter
from headrace.bench.server import served_model, serving
from headrace.bench.suite import tokenizer_of
from headrace.core.base.errors import ConfigError
from headrace.core.base.types import NS_PER_MS
from headrace.core.cost.calibration import Calibration, Host, Line
from headrace.core.cost.contention import fit_steps
from headrace.core.cost.fitted import Link
from headrace.live.step_log import LoggedTimes, SeenRequest, read_logs, whole_way

SEED = 1000
MIN_COPIES = 8  # below, a fit of the link says little
CROWD_NS, MOST_TOGETHER = 20_000_000, 3  # requests within that time of each other
MESSAGE_NS = 0.2 * NS_PER_MS  # which a simulation of several workers counts by itself

# What a round asks at the same time: (seconds after its begin, prompt tokens, output tokens).
Shape = tuple[float, int, int]


def shapes_of(num_workers: int) -> list[list[Shape]]:
    """Rounds for so many workers: prompts alone, decoding at several widths, long contexts, and
    prompts that come while others decode.
    """
    lengths = (24, 48, 90, 150, 230, 330, 460, 640, 900, 1200)
    alone = [[(0.0, length, 24)] for length in lengths for _ in range(2)]
    widths = [
        [(0.0, 24, 48)] * (width * num_workers)
        for width in (1, 2, 4, 8, 16)
        if width * num_workers > 1
    ]
    long = [[(0.0, 1200, 24)] * num_workers, [(0.0, 400, 24)] * (3 * num_workers)]
    beside: list[list[Shape]] = []
    for num_decoding, gap_s in ((2, 0.5), (6, 0.7)):
        decoding = [(0.0, 40, 90)] * (num_decoding * num_workers)
        prompts = [
            (gap_s * (place + 1), length, 8)
            for place, length in enumerate((64, 220, 120, 350))
            for _ in range(num_workers)
        ]
        beside.append([*decoding, *prompts])
    return [*alone, *widths, *long, *beside]


def measure(
    serve: Sequence[str],
    model: Path,
    *,
    num_passes: int = 1,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Start `headrace serve` with these arguments, and calibrate it. Takes about half a minute for
    each pass and worker on a laptop; `on_round` hears how many rounds are done, of how many.
    """
    folder = Path(tempfile.mkdtemp(prefix="headrace-calibrate-"))
    log = folder / "events.log"
    words = [*serve, "--model", str(model), "--event-log", str(log)]
    with serving(words, folder / "server.log") as served:
        target = Target(served.url, served_model(served.url))
        num_workers = len(list(folder.glob("events.log.*"))) or 1
        writer = PromptWriter(tokenizer_of(model).encode, SEED)
        answers: list[Answer] = []
        shapes, done = shapes_of(num_workers), count(1)
        on_round(0, num_passes * len(shapes))
        for _ in range(num_passes):
            asyncio.run(warm_up(target, writer))
            rounds = [[_ask(shape, writer) for shape in one] for one in shapes]
            offered = offer_rounds(
                target, rounds, lambda: on_round(next(done), num_passes * len(shapes))
            )
            for found in asyncio.run(offered):
                answers += found
    logs = sorted(folder.glob("events.log*"))
    times = read_logs(logs)
    # What went wrong before this would be told there.
    shutil.rmtree(folder)
    return calibration_of(times, answers, num_workers=len(logs), source="a load of its own")


def _ask(shape: Shape, writer: PromptWriter) -> Ask:
    at_s, num_prompt, num_output = shape
    return Ask(at_s=at_s, prompt=writer.write(num_prompt), num_output_tokens=num_output)


def calibration_of(
    times: LoggedTimes, answers: Sequence[Answer], *, num_workers: int, source: str
) -> Calibration:
    """Raises ConfigError where the logs say too little."""
    fit = fit_steps(times.steps)
    facts = machine()
    try:
        return Calibration(
            headrace_version=__version__,
            machine=f"{facts.cpu}, {facts.num_cores} cores",
            num_workers=num_workers,
            source=f"{len(times.steps)} steps of {source}",
            config=times.header.config,
            spec=times.header.spec,
            steps=fit.cost,
            believed=times.header.cost,
            host_share=fit.host_share,
            host=host_of(times, answers, MESSAGE_NS if num_workers > 1 else 0.0),
            slow_down=fit.slow_down,
            slow_down_large=fit.slow_down_large,
            kv_link=link_of(times),
            seen=fit.seen,
            held_out=fit.held_out,
            residuals=fit.residuals,
        )
    except ValueError as error:
        raise ConfigError(f"the log says what cannot be: {error}") from None


def link_of(times: LoggedTimes) -> Link | None:
    """By blocks, not bytes: logs do not know how large a block is on its way. The mean of copies
    that came between steps of others is kept.
    """
    if len(times.copies) < MIN_COPIES:
        return None
    line = Line.fit([(copy.num_blocks, copy.elapsed_ns) for copy in times.copies])
    return Link(latency_ns=line.fixed_ns, byte_ns=max(1e-3, line.each_ns))


def host_of(times: LoggedTimes, answers: Sequence[Answer], message_ns: float) -> Host:
    """What passes from the client to the engine and back; without clients, from the server on."""
    pairs = matched(times, answers)
    if not pairs:
        line = _in_server(map(whole_way, times.requests.values()), message_ns)
        return Host(request=line, server=line)
    alone = not_crowded(pairs)
    points = [
        (seq.num_prompt_tokens, max(0.0, seq.arrived_ns - answer.sent_ns - message_ns))
        for answer, seq in alone
    ]
    first = [answer.first_token_ns - (seq.first_token_ns or 0) for answer, seq in alone]
    later = [answer.last_token_ns - (seq.last_token_ns or 0) for answer, seq in pairs]
    return Host(
        request=Line.fit(points),
        server=_in_server((seq for _, seq in alone), message_ns),
        first_token_ns=max(0.0, fmean(first) - message_ns),
        token_ns=max(0.0, fmean(later) - message_ns),
        has_client=True,
    )


def _in_server(seqs: Iterable[SeenRequest], message_ns: float) -> Line:
    """From the moment at which the server has a request until the engine has it."""
    return Line.fit(
        [
            (seq.num_prompt_tokens, max(0.0, seq.arrived_ns - seq.come_ns - message_ns))
            for seq in seqs
        ]
    )


def not_crowded(
    pairs: Sequence[tuple[Answer, SeenRequest]],
) -> Sequence[tuple[Answer, SeenRequest]]:
    """Those of requests beside which few others were sent; all, where there are none."""
    moments = sorted(answer.sent_ns for answer, _ in pairs)

    def is_alone(at_ns: int) -> bool:
        near = bisect_right(moments, at_ns + CROWD_NS) - bisect_left(moments, at_ns - CROWD_NS)
        return near <= MOST_TOGETHER

    return [pair for pair in pairs if is_alone(pair[0].sent_ns)] or pairs


def matched(times: LoggedTimes, answers: Sequence[Answer]) -> list[tuple[Answer, SeenRequest]]:
    """Each answer with what a log says of it: the first of its length that came after it was sent.

    Requests of one length that are sent at once may be taken for each other, which no mean minds.
    """
    waiting = sorted(map(whole_way, times.requests.values()), key=lambda seq: seq.come_ns)
    pairs = []
    for answer in sorted(answers, key=lambda a: a.sent_ns):
        for place, seq in enumerate(waiting):
            if seq.num_prompt_tokens == answer.num_prompt_tokens and seq.come_ns >= answer.sent_ns:
                pairs.append((answer, waiting.pop(place)))
                break
    return pairs
