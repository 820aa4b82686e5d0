"""`headrace sim run`: what was recorded, simulated as it was, and how near that comes."""

from typing import Any

import msgspec

from headrace.cli.output import print_json, print_table, report_error, report_note
from headrace.cli.plan_answer import report_provenance
from headrace.cli.sim_cost import machine_of, with_beyond
from headrace.cli.sim_log import is_recording, load_recording, notes_on, path_of
from headrace.cli.sim_progress import showing
from headrace.cli.sim_tables import figure_table, miss_table, report_doubts
from headrace.cli.sim_whatif_flags import MachineFlags
from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.engine.trace import Frame
from headrace.core.workload.recording import Recording
from headrace.live.event_log import EventLogReader
from headrace.plan.engines import Provenance
from headrace.sim.compare import Run, compare, misses
from headrace.sim.doubts import doubts_of
from headrace.sim.outcomes import recorded_outcomes
from headrace.sim.recorded import Rerun, rerun
from headrace.sim.whatif import Trial, default_slo, run_trial, span_s


def run(
    log: str, slo: Slo, flags: MachineFlags, *, like: str = "", seed: int, as_json: bool
) -> int:
    """Exit code 1 where an event log is decided otherwise than recorded."""
    if is_recording(path_of(log)):
        recording = load_recording(log, like)
        machine = machine_of(flags, log, like, recording)
        trial = Trial(slo=slo, seed=seed, machine=machine.calibration, sharing=machine.sharing)
        is_other = bool(like) or machine.calibration is not None
        return _run_recording(
            recording, trial, machine.provenance, is_other=is_other, as_json=as_json
        )
    if flags != MachineFlags():
        raise ConfigError(
            "an event log is decided again with the times that its steps took",
            hint="leave out --cost and --sharing, or ask `headrace sim whatif`",
        )
    if like:
        raise ConfigError(
            "an event log is decided again by the engine that it is of", hint="leave out --like"
        )
    return _run_events(log, as_json=as_json)


def _run_recording(
    recording: Recording, trial: Trial, provenance: Provenance, *, is_other: bool, as_json: bool
) -> int:
    """`is_other`: the machine that serves is not the recorded one."""
    with showing("", len(recording.requests)) as seen:
        simulated = run_trial(recording, trial, seen)
    provenance = with_beyond(provenance, simulated.beyond)
    length_s = span_s(recording)
    was = Run(
        outcomes=(recorded_outcomes(recording, default_slo(recording, trial)),), span_s=length_s
    )
    will = Run(outcomes=(simulated,), span_s=length_s)
    found, changed = compare(was, will, seed=trial.seed), misses(was, will)
    doubts = doubts_of(
        recording,
        {name: one.before for name, one in found.items()},
        None if is_other else {name: one.after for name, one in found.items()},
    )
    if as_json:
        print_json(
            {
                "kind": "recording",
                "num_requests": len(recording.requests),
                "figures": msgspec.to_builtins(found),
                "misses": msgspec.to_builtins(changed),
                "trace_hash": simulated.trace_hash,
                "notes": notes_on(recording),
                "doubts": msgspec.to_builtins(doubts),
                "provenance": msgspec.to_builtins(provenance),
            }
        )
        return 0
    title = f"{len(recording.requests)} requests in {length_s:,.1f} s"
    print_table(figure_table(title, found, ("recorded", "simulated")))
    if changed:
        print_table(miss_table(changed, ("recorded", "simulated")))
    report_doubts(doubts)
    for note in notes_on(recording):
        report_note(note)
    report_provenance(provenance)
    return 0


def _run_events(log: str, *, as_json: bool) -> int:
    with EventLogReader(path_of(log)) as reader:
        header, frames = reader.header, list(reader)
        is_truncated = reader.is_truncated
    with showing("", len(frames), of="events") as seen:
        found = rerun(header.config, header.spec, header.cost, frames, seen)
    if as_json:
        print_json(
            {
                "kind": "event log",
                "num_events": found.num_events,
                "num_steps": found.num_steps,
                "is_equal": found.is_equal,
                "is_truncated": is_truncated,
                "recorded": _words(found.recorded),
                "simulated": _words(found.simulated),
            }
        )
    elif found.is_equal:
        cut = "; the log's last frame is cut" if is_truncated else ""
        print(f"{found.num_events} events, {found.num_steps} steps: decided as recorded{cut}")
    else:
        report_error(_difference(found))
    return 0 if found.is_equal else 1


def _words(frame: Frame | None) -> Any:
    return None if frame is None else msgspec.to_builtins(frame)


def _difference(found: Rerun) -> str:
    return (
        f"event {found.num_events} is not as recorded"
        f"\nrecorded: {found.recorded}\nsimulated: {found.simulated}"
    )
