"""Logs tell when steps began and ended, and how requests came to the engine."""

from pathlib import Path

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.types import Ns
from headrace.core.cost.contention import fit_steps
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape
from headrace.live.step_log import SeenRequest, read_logs, whole_way
from support.calibrations import write_log


def test_steps_and_requests_of_a_log(tmp_path: Path) -> None:
    write_log(tmp_path / "log", num_seqs=12, come_ns=7_000_000)
    times = read_logs([tmp_path / "log"])
    prior = FittedCostModel.prior()
    for step in times.steps:
        assert step.end_ns - step.begin_ns == step.device_ns == prior.step_ns(step.shape)
    assert len(times.requests) == 12
    for (request,) in times.requests.values():
        assert request.arrived_ns - request.come_ns == 7_000_000
        assert request.first_token_ns is not None
        assert request.last_token_ns is not None
        assert request.arrived_ns < request.first_token_ns <= request.last_token_ns
    fit = fit_steps(times.steps)
    for shape in (StepShape(1, 1, 1, 100, 100), StepShape(300, 1, 1, 45_150, 300)):
        assert fit.cost.step_ns(shape) == pytest.approx(prior.step_ns(shape), rel=0.02)
    assert fit.held_out.mean < 0.01


def test_workers_are_told_apart_and_must_be_alike(tmp_path: Path) -> None:
    write_log(tmp_path / "a", num_seqs=4)
    write_log(tmp_path / "b", num_seqs=4, seed=2)
    assert {step.worker for step in read_logs([tmp_path / "a", tmp_path / "b"]).steps} == {0, 1}
    with pytest.raises(ConfigError, match="no log"):
        read_logs([])
    (tmp_path / "c").write_bytes(b"no log at all")
    with pytest.raises(ConfigError):
        read_logs([tmp_path / "c"])


def test_the_way_of_a_request_over_two_workers() -> None:
    decode = SeenRequest(9, Ns(1), Ns(50), Ns(60), Ns(90))
    prefill = SeenRequest(9, Ns(1), Ns(5), Ns(40), Ns(40))
    assert whole_way([decode, prefill]) == SeenRequest(9, Ns(1), Ns(5), Ns(40), Ns(90))
    assert whole_way([SeenRequest(9, Ns(1), Ns(5))]) == SeenRequest(9, Ns(1), Ns(5))
