"""`headrace sim whatif`: recorded traffic under another configuration, beside the recorded one."""

from dataclasses import asdict
from typing import Any, Final

import msgspec

from headrace.cli.output import print_json, print_table, report_note
from headrace.cli.plan_answer import report_provenance
from headrace.cli.plan_target import check_range
from headrace.cli.sim_cost import Machine, machine_of, with_beyond
from headrace.cli.sim_log import load_recording, notes_on
from headrace.cli.sim_progress import showing
from headrace.cli.sim_tables import figure_table, miss_table, report_doubts
from headrace.cli.sim_whatif_flags import MachineFlags, SloFlags, WhatIfFlags
from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.config.settings import SETTINGS
from headrace.core.cost.limits import MAX_BLOCKS
from headrace.core.workload.recording import Recording
from headrace.sim.compare import NUM_BLOCKS, NUM_DRAWS, Run, compare, figures, misses
from headrace.sim.doubts import doubts_of
from headrace.sim.outcomes import recorded_outcomes
from headrace.sim.whatif import Changes, Trial, default_slo, run_trial, span_s

# The settings whose choices and limits flags of a change have.
_SETTING_OF: Final = {
    "policy": "router.policy",
    "handoff": "cluster.handoff",
    "order": "scheduler.order",
    "budget": "scheduler.budget",
    "admission": "scheduler.admission",
    "max_running": "scheduler.max_running_seqs",
    "step_tokens": "scheduler.step_tokens",
    "itl_target_ms": "scheduler.itl_target_ms",
    "workers": "cluster.workers",
    "prefill": "cluster.prefill",
    "decode": "cluster.decode",
}
INTERVALS: Final = (
    f"intervals: 95 % of {NUM_DRAWS} draws of a paired bootstrap over up to {NUM_BLOCKS} blocks of"
    " neighbouring requests, the same requests for both"
)


def slo_of(flags: SloFlags) -> Slo:
    stated = {name.removeprefix("slo_"): limit for name, limit in asdict(flags).items()}
    for name, limit in stated.items():
        check_range(f"--slo-{name.replace('_', '-')}", 1.0 if limit is None else limit, 1e-3, 1e9)
    return Slo(**stated)


def whatif(
    log: str,
    flags: WhatIfFlags,
    slo: Slo,
    machine_flags: MachineFlags,
    *,
    like: str = "",
    as_json: bool,
) -> int:
    changes = changes_of(flags)
    recording = load_recording(log, like)
    machine = machine_of(machine_flags, log, like, recording)
    was, before, after = _runs(recording, changes, flags, slo, machine)
    beyond = {words for run in (before, after) for one in run.outcomes for words in one.beyond}
    provenance = with_beyond(machine.provenance, beyond)
    found, changed = compare(before, after, seed=flags.seed), misses(before, after)
    as_recorded = figures(was)
    is_other = bool(like) or machine_flags.cost is not None or flags.speed != 1.0
    doubts = doubts_of(
        recording,
        as_recorded,
        None if is_other else {name: one.before for name, one in found.items()},
    )
    if as_json:
        answer = _answer(recording, changes, flags, as_recorded, found, changed)
        answer["doubts"] = msgspec.to_builtins(doubts)
        print_json({**answer, "provenance": msgspec.to_builtins(provenance)})
        return 0
    columns = ("recorded", "simulated", "asked")
    num = len(recording.requests)
    title = f"{num} requests in {before.span_s:,.1f} s; asked: {_words(changes)}"
    print_table(figure_table(title, found, columns, as_recorded))
    if changed:
        print_table(miss_table(changed, ("simulated", "asked")))
    report_note(INTERVALS + (f", {flags.seeds} seeds" if flags.seeds > 1 else ""))
    report_doubts(doubts)
    for note in notes_on(recording):
        report_note(note)
    report_provenance(provenance)
    return 0


def changes_of(flags: WhatIfFlags) -> Changes:
    """Raises ConfigError for a value that the setting of that name could not have."""
    for name, key in _SETTING_OF.items():
        value = getattr(flags, name)
        setting = SETTINGS[key]
        if value is None:
            continue
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"--{name} is {value!r}", hint="known: " + ", ".join(setting.choices))
        if not setting.choices:
            low = 0.0 if setting.low is None else setting.low
            high = 1e12 if setting.high is None else setting.high
            check_range(f"--{name.replace('_', '-')}", value, low, high)
    for name in ("kv_link_gb_s", "kv_host_gb_s", "kv_disk_gb_s"):
        gb_s = getattr(flags, name)
        check_range(f"--{name.replace('_', '-')}", 1.0 if gb_s is None else gb_s, 1e-6, 1e6)
    for tier in ("host", "disk"):
        if getattr(flags, f"kv_{tier}_gb_s") is not None and getattr(flags, f"kv_{tier}") is None:
            raise ConfigError(
                f"--kv-{tier}-gb-s is the speed of a tier that is not there",
                hint=f"--kv-{tier} 64GiB says how large it is",
            )
    check_range("--kv-blocks", 1 if flags.kv_blocks is None else flags.kv_blocks, 1, MAX_BLOCKS)
    check_range("--speed", flags.speed, 1e-6, 1e6)
    check_range("--seeds", flags.seeds, 1, 1000)
    check_range("--price", 0.0 if flags.price is None else flags.price, 0.0, 1e9)
    given = asdict(flags)
    given["max_running_seqs"] = given.pop("max_running")
    given["kv_host_bytes"] = _size("--kv-host", flags.kv_host)
    given["kv_disk_bytes"] = _size("--kv-disk", flags.kv_disk)
    return Changes(**{name: given[name] for name in Changes.__struct_fields__})


def _size(flag: str, text: str | None) -> int | None:
    """As settings have sizes. Raises ConfigError."""
    if text is None:
        return None
    try:
        size = SETTINGS["kv.memory_bytes"].parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from error
    assert isinstance(size, int)
    return size


def _runs(
    recording: Recording, changes: Changes, flags: WhatIfFlags, slo: Slo, machine: Machine
) -> tuple[Run, Run, Run]:
    """As it was; simulated as it was; simulated as asked."""
    length_s, price = span_s(recording, flags.speed), flags.price or 0.0
    seeds = range(flags.seed, flags.seed + flags.seeds)

    def simulated(name: str, what: Changes) -> Run:
        trials = [
            Trial(
                changes=what,
                slo=slo,
                speed=flags.speed,
                seed=seed,
                machine=machine.calibration,
                sharing=machine.sharing,
            )
            for seed in seeds
        ]
        outcomes = []
        for trial in trials:
            label = name if flags.seeds == 1 else f"{name}, seed {trial.seed}"
            with showing(label, len(recording.requests)) as seen:
                outcomes.append(run_trial(recording, trial, seen))
        return Run(outcomes=tuple(outcomes), span_s=length_s, price_per_hour=price)

    was = recorded_outcomes(recording, default_slo(recording, Trial(slo=slo)))
    as_it_was = Run(outcomes=(was,), span_s=span_s(recording), price_per_hour=price)
    return as_it_was, simulated("as recorded", Changes()), simulated("as asked", changes)


def _words(changes: Changes) -> str:
    asked = {
        name: value for name, value in msgspec.structs.asdict(changes).items() if value is not None
    }
    return ", ".join(f"{name} {value}" for name, value in asked.items()) or "nothing else"


def _answer(
    recording: Recording,
    changes: Changes,
    flags: WhatIfFlags,
    as_recorded: dict[str, float | None],
    found: Any,
    changed: Any,
) -> dict[str, Any]:
    return {
        "num_requests": len(recording.requests),
        "asked": msgspec.to_builtins(changes),
        "speed": flags.speed,
        "seeds": flags.seeds,
        "recorded": as_recorded,
        "figures": msgspec.to_builtins(found),
        "misses": msgspec.to_builtins(changed),
        "intervals": INTERVALS,
        "notes": notes_on(recording),
    }
