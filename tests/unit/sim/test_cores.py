"""Workers on the same cores: who is alone is fast, and work is never lost nor done twice."""

from functools import partial

from headrace.core.base.types import Ns
from headrace.sim.cores import SharedCores
from headrace.sim.runtime import SimRuntime


def run(
    slow_down: tuple[float, ...], steps: list[tuple[int, str, int]], stop: tuple[int, str] = (0, "")
) -> dict[str, int]:
    """When the steps (begin, worker, work) end."""
    runtime = SimRuntime()
    cores = SharedCores(slow_down, runtime)
    ends: dict[str, int] = {}

    def start(worker: str, work: int) -> None:
        cores.start(worker, Ns(work), lambda: ends.__setitem__(worker, runtime.now))

    for begin, worker, work in steps:
        runtime.call_at(Ns(begin), partial(start, worker, work))
    if stop[1]:
        runtime.call_at(Ns(stop[0]), lambda: cores.stop(stop[1]))
    runtime.run(max_calls=1000)
    return ends


def test_alone_a_step_takes_its_work() -> None:
    assert run((1.0, 1.5), [(100, "a", 1000)]) == {"a": 1100}


def test_together_they_slow_each_other_down_for_as_long_as_they_are_together() -> None:
    # a alone for 400; both at 1/2 until b is done 1200 later, which is 600 of a's work.
    ends = run((1.0, 2.0), [(0, "a", 2000), (400, "b", 600)])
    assert ends == {"b": 1600, "a": 1600 + 1000}


def test_equal_steps_end_at_once() -> None:
    assert run((1.0, 1.5), [(0, "a", 600), (0, "b", 600)]) == {"a": 900, "b": 900}


def test_more_than_were_measured_share_what_those_had() -> None:
    steps = [(0, name, 300) for name in "abcd"]
    assert set(run((1.0, 1.5), steps).values()) == {900}


def test_a_worker_that_stops_leaves_its_cores_to_others() -> None:
    ends = run((1.0, 2.0), [(0, "a", 1000), (0, "b", 5000)], stop=(1000, "b"))
    assert ends == {"a": 1500}


def test_large_steps_slow_down_by_figures_of_their_own() -> None:
    runtime, ends = SimRuntime(), dict[str, int]()
    cores = SharedCores((1.0, 1.5), runtime, slow_down_large=(1.0, 2.0))
    for name, num_tokens in (("small", 15), ("large", 16)):
        cores.start(
            name, Ns(600), partial(lambda n: ends.update({n: runtime.now}), name), num_tokens
        )
    runtime.run(max_calls=100)
    # The small one is done after 900, by when the large one has 450 behind it; then it is alone.
    assert ends == {"small": 900, "large": 900 + 150}
