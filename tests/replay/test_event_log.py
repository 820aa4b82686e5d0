"""What a live engine recorded: it reads back, replays to the same effects, and re-runs in the
simulator.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as replace_frame

from headrace.adapters.executors.sim import FakeSteps, SimExecutor
from headrace.core.base.errors import ConfigError
from headrace.core.base.events import (
    Finish,
    StartStep,
    StepDone,
)
from headrace.core.base.plan import StepPlan
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.config.schema import KvConfig, SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.trace import Frame
from headrace.live.engine import LiveEngine
from headrace.live.event_log import MAX_FRAME_BYTES, EventLogReader, EventLogWriter, LogHeader
from headrace.live.replay import replay
from headrace.sim.recorded import recorded_setup, rerun
from headrace.sim.world import World, simulate
from support.fake_device import LinearCost
from support.live import WAIT_S, Ear, seq_spec, worker_spec

CONFIG = WorkerConfig(
    scheduler=SchedulerConfig(
        step_tokens=24, budget="itl", itl_target_ms=0.5, early_reject=True, order="slo_slack"
    ),
    kv=KvConfig(),
)


def call_later(delay_ns: Ns, call: Callable[[], None]) -> None:
    threading.Timer(delay_ns / NS_PER_S, call).start()


def record(path: Path, *, failure_rate: float = 0.1) -> list[Frame]:
    """A live run that meets preemption, faults, cancels and early rejection, from two client
    threads' worth of work.
    """
    spec = worker_spec(num_blocks=24)
    steps = FakeSteps(LinearCost(), spec.vocab_size, seed=5, failure_rate=failure_rate)
    executor = SimExecutor(spec, steps, call_later)
    seen: list[Frame] = []
    engine = LiveEngine(CONFIG, executor, event_log=path)
    engine.observe(lambda now, event, effects: seen.append(Frame(now, event, tuple(effects))))
    ear = Ear()
    for i in range(30):
        prompt = tuple(range(i % 20 + 1)) + (i % 7,) * i
        one = seq_spec(
            2 * i, prompt, max_tokens=40, logprobs=1, prompt_logprobs=0 if i % 4 == 0 else None
        )
        other = seq_spec(2 * i + 1, prompt, max_tokens=12, seed=2**64 - 1)
        if i % 5 == 0:
            other = msgspec.structs.replace(other, slo=Slo(ttft_ms=1e-6))
        if i % 4 == 1:
            # Some end by it, some before; its timer rings later than due in either case.
            due = Ns(time.monotonic_ns() + (5_000_000 if i == 1 else i * 20_000))
            other = msgspec.structs.replace(other, deadline_ns=due)
        engine.submit([one, other], ear)
        if i % 3 == 0:
            engine.cancel(SeqId(2 * i))
        # Let some steps run between arrivals.
        for _ in range(4):
            if len(ear.ends) < 2 * (i + 1):
                ear.hear()
    ear.hear_ends(60)
    assert engine.drain(WAIT_S)
    engine.close()
    return seen


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Frame]]:
    path = tmp_path_factory.mktemp("log") / "engine.hrlog"
    return path, record(path)


def read(path: Path) -> list[Frame]:
    with EventLogReader(path) as log:
        return list(log)


def rewrite(source: Path, target: Path, change: "dict[int, Frame]") -> None:
    with EventLogReader(source) as log:
        writer = EventLogWriter(target, log.header)
        for index, frame in enumerate(log):
            new = change.get(index, frame)
            writer.write(new.now, new.event, new.effects)
        writer.close()


def plans_of(frames: list[Frame]) -> list[StepPlan]:
    return [
        effect.plan for frame in frames for effect in frame.effects if isinstance(effect, StartStep)
    ]


def test_the_log_holds_what_happened(recorded: tuple[Path, list[Frame]]) -> None:
    path, seen = recorded
    with EventLogReader(path) as log:
        assert log.header.config == CONFIG
        assert log.header.spec == worker_spec(num_blocks=24)
        assert log.header.cost == FittedCostModel.prior()
        assert list(log) == seen
        assert not log.is_truncated
    kinds = {type(frame.event) for frame in seen} | {
        type(e) for frame in seen for e in frame.effects
    }
    names = {kind.__name__ for kind in kinds}
    assert names >= {
        "Arrive",
        "Cancel",
        "StepDone",
        "StepFailed",
        "Reject",
        "Finish",
        "Emit",
        "KvChanged",
        "CallAt",
        "Timer",
    }
    reasons = {e.reason for frame in seen for e in frame.effects if isinstance(e, Finish)}
    assert FinishReason.DEADLINE in reasons


def test_a_replay_has_the_recorded_effects(recorded: tuple[Path, list[Frame]]) -> None:
    path, seen = recorded
    report = replay(path)
    assert report.is_equal, str(report.difference)
    assert report.num_events == len(seen)
    assert not report.is_truncated


def test_a_replay_finds_the_first_difference(
    recorded: tuple[Path, list[Frame]], tmp_path: Path
) -> None:
    path, seen = recorded
    index = next(
        i
        for i, frame in enumerate(seen)
        if isinstance(frame.event, StepDone) and len(frame.effects) > 1
    )
    frame = seen[index]
    changed = Frame(frame.now, frame.event, frame.effects[:1] + frame.effects[2:])
    rewrite(path, tmp_path / "changed", {index: changed})
    difference = replay(tmp_path / "changed").difference
    assert difference is not None
    assert (difference.event_index, difference.effect_index) == (index, 1)
    assert difference.replayed == frame.effects[1]
    assert difference.recorded == (changed.effects[1] if len(changed.effects) > 1 else None)
    assert f"event {index} (StepDone" in str(difference)


def test_a_replay_of_another_configuration_differs(
    recorded: tuple[Path, list[Frame]], tmp_path: Path
) -> None:
    path, _ = recorded
    with EventLogReader(path) as log:
        config = WorkerConfig(scheduler=SchedulerConfig(step_tokens=8), kv=KvConfig())
        writer = EventLogWriter(
            tmp_path / "other", msgspec.structs.replace(log.header, config=config)
        )
        for frame in log:
            writer.write(frame.now, frame.event, frame.effects)
        writer.close()
    assert not replay(tmp_path / "other").is_equal


def test_a_cut_tail_is_reported_and_the_rest_is_good(
    recorded: tuple[Path, list[Frame]], tmp_path: Path
) -> None:
    path, seen = recorded
    data = path.read_bytes()
    for num_cut in (1, 3, 40):
        cut = tmp_path / f"cut{num_cut}"
        cut.write_bytes(data[:-num_cut])
        report = replay(cut)
        assert report.is_equal
        assert report.is_truncated
        assert report.num_events == len(read(cut)) < len(seen)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"GGUF" * 10,
        b"\x05\x00\x00\x00hello",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"x" * 9,
    ],
)
def test_a_file_that_is_no_log_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.log"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        EventLogReader(path)


def test_a_missing_log_and_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        EventLogReader(tmp_path / "none")
    header = LogHeader(
        format="hrlog9", config=CONFIG, spec=worker_spec(), cost=FittedCostModel.prior()
    )
    EventLogWriter(tmp_path / "nine", header).close()
    with pytest.raises(ConfigError, match="hrlog1"):
        EventLogReader(tmp_path / "nine")


def test_a_damaged_frame_is_an_error(recorded: tuple[Path, list[Frame]], tmp_path: Path) -> None:
    path, _ = recorded
    (tmp_path / "damaged").write_bytes(path.read_bytes() + b"\x03\x00\x00\x00abc")
    with pytest.raises(ConfigError, match="damaged"):
        replay(tmp_path / "damaged")


def test_a_worker_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(worker_spec(), block_size=0)
    header = LogHeader(config=CONFIG, spec=spec, cost=FittedCostModel.prior())
    EventLogWriter(tmp_path / "damaged", header).close()
    with pytest.raises(ConfigError, match="damaged: block_size is 0"):
        replay(tmp_path / "damaged")


def test_the_simulator_takes_the_decisions_of_the_live_engine(
    recorded: tuple[Path, list[Frame]],
) -> None:
    """The same plans in the same order, from nothing but recorded arrivals and step times."""
    path, seen = recorded
    with EventLogReader(path) as log:
        header, frames = log.header, list(log)
    setup = recorded_setup(header.config, header.spec, header.cost, frames)
    simulated: list[Frame] = []

    simulate(
        World(workers=(setup,)),
        lambda _, now, event, effects: simulated.append(Frame(now, event, tuple(effects))),
    )
    assert plans_of(simulated) == plans_of(seen)
    assert simulated == seen


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_log_that_a_crash_cut_is_decided_as_recorded(
    recorded: tuple[Path, list[Frame]], share: float
) -> None:
    """Steps that were under way have no end in it, which is no difference."""
    path, seen = recorded
    with EventLogReader(path) as log:
        header = log.header
    ends = [place for place, frame in enumerate(seen, 1) if plans_of([frame])]
    kept = seen[: ends[int(share * len(ends))]]
    found = rerun(header.config, header.spec, header.cost, kept)
    assert (found.is_equal, found.num_events) == (True, len(kept))
    other = [*kept[:-1], replace_frame(kept[-1], effects=())]
    assert not rerun(header.config, header.spec, header.cost, other).is_equal


def test_the_recorded_times_matter(recorded: tuple[Path, list[Frame]]) -> None:
    """Or the test above would hold whatever the log says about time."""
    _, seen = recorded
    setup = recorded_setup(CONFIG, worker_spec(num_blocks=24), FittedCostModel.prior(), seen)
    at_once = replace(setup, inputs=[(seen[0].now, event) for _, event in setup.inputs])
    simulated: list[Frame] = []
    simulate(
        World(workers=(at_once,)),
        lambda _, now, event, effects: simulated.append(Frame(now, event, tuple(effects))),
    )
    assert plans_of(simulated) != plans_of(seen)
