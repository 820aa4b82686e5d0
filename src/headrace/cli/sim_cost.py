"""Whose step times a simulation takes: those of a calibrated machine, or of the log itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from headrace.bench.calibrate import calibration_of
from headrace.cli.plan_target import check_range
from headrace.cli.sim_log import is_recording, path_of
from headrace.cli.sim_whatif_flags import MachineFlags
from headrace.core.base.errors import ConfigError
from headrace.core.cost.calibration import Calibration
from headrace.core.cost.contention import MIN_STEPS
from headrace.core.workload.recording import PoolFacts, Recording
from headrace.live.cost_file import read_calibration
from headrace.live.step_fit import NAME as STEP_FIT
from headrace.live.step_log import read_logs
from headrace.plan.engines import Provenance

MAX_SHARING: Final = 4096
USUAL_ERROR: Final = 0.3  # of single steps on a quiet machine: 11 to 22 %
BUSY: Final = "usual are 10 to 20 %, so the machine was busy with something else"


class Machine(NamedTuple):
    """What serves a recording; without a calibration, what the recording itself knows."""

    calibration: Calibration | None
    sharing: int | None
    provenance: Provenance


def provenance_of(found: Calibration, file: str, sharing: int) -> Provenance:
    error = found.held_out
    sources = [
        f"{file}: {found.source} on {found.machine}",
        f"relative error of {error.num_steps} steps held out: {error.mean:.1%} on average,"
        f" p95 {error.p95:.1%}, all together {error.bias:+.1%}"
        + (f": {BUSY}" if error.mean > USUAL_ERROR else ""),
        "each worker has a machine of its own"
        if sharing == 1
        else f"{sharing} workers share the cores of each machine",
    ]
    if not found.host.has_client:
        sources.append("the way from clients to the server and back is not in it")
    if found.kv_link is None:
        sources.append("copies of KV between workers were not seen: they take the link's latency")
    beyond: tuple[str, ...] = ()
    if sharing > found.seen.num_workers:
        most = found.seen.num_workers
        beyond = (f"{sharing} workers on one machine: seen up to {most} in a step at once",)
    return Provenance(kind="calibrated", sources=tuple(sources), extrapolates=beyond)


def with_beyond(provenance: Provenance, beyond: Iterable[str]) -> Provenance:
    """With what a run asked for that was never measured."""
    told = (*provenance.extrapolates, *sorted(beyond))
    return msgspec.structs.replace(provenance, extrapolates=told)


def machine_of(flags: MachineFlags, log: str, like: str, recording: Recording) -> Machine:
    """The asked one; else, of an event log, what its own steps come to. Raises ConfigError."""
    found = _machine_of(flags, log, like, recording)
    if not like:
        return found
    told = found.provenance
    sources = (f"requests of {log} on the workers of {like}, their number too", *told.sources)
    return found._replace(provenance=msgspec.structs.replace(told, sources=sources))


def _machine_of(flags: MachineFlags, log: str, like: str, recording: Recording) -> Machine:
    if flags.sharing is not None:
        check_range("--sharing", flags.sharing, 1, MAX_SHARING)
    if flags.cost is not None:
        found = read_calibration(Path(flags.cost).expanduser())
        told = provenance_of(found, flags.cost, flags.sharing or found.num_workers)
        digests = {pool.spec.model_digest for one in recording.pools for pool in one.pools}
        if found.spec.model_digest not in digests:
            told = with_beyond(told, ["another model was calibrated than was recorded"])
        return Machine(found, flags.sharing, told)
    if flags.sharing is not None:
        raise ConfigError(
            "--sharing is of a machine that was calibrated", hint="name one: --cost FILE"
        )
    return _own_machine(like or log, recording)


def workers_words(pool: PoolFacts) -> str:
    if pool.num_workers == 1:
        return f"1 {pool.role} worker"
    return f"{pool.num_workers} {pool.role} workers, each"


def _steps_words(pool: PoolFacts) -> str:
    """A worker with few steps has what it measured before it served, or a guess."""
    if pool.cost.name == STEP_FIT:
        return "recorded steps, as their driver saw them"
    return f"steps that were not recorded ({pool.cost.name}); it had too few since"


def _own_machine(log: str, recording: Recording) -> Machine:
    if not is_recording(path_of(log)):
        times = read_logs([path_of(log)])
        if len(times.steps) >= MIN_STEPS:
            found = calibration_of(times, (), num_workers=1, source="its own")
            return Machine(found, None, provenance_of(found, log, 1))
    pools = recording.pools[-1].pools if recording.pools else ()
    sources = tuple(
        f"{workers_words(pool)} with a machine like the recorded one's:"
        f" {pool.cost.num_samples} {_steps_words(pool)}"
        for pool in pools
    )
    few = tuple(
        f"{pool.cost.num_samples} steps of {pool.role} workers: of fewer than {MIN_STEPS} a fit"
        " says little, and --cost FILE more"
        for pool in pools
        if pool.cost.num_samples < MIN_STEPS
    )
    return Machine(None, None, Provenance(kind="recorded", sources=sources, extrapolates=few))
