"""`headrace replay`: a recorded engine, decided again."""

from pathlib import Path

import msgspec

from headrace.cli.output import print_json, report_error
from headrace.live.replay import replay as replay_log


def replay(log: str, *, as_json: bool) -> int:
    report = replay_log(Path(log).expanduser())
    if as_json:
        print_json(
            {
                "is_equal": report.is_equal,
                "num_events": report.num_events,
                "is_truncated": report.is_truncated,
                "difference": msgspec.to_builtins(report.difference),
            }
        )
    else:
        cut = "; the log's last frame is cut" if report.is_truncated else ""
        if report.is_equal:
            print(f"{report.num_events} events, every effect as recorded{cut}")
        else:
            report_error(f"an effect is not as recorded{cut}\n{report.difference}")
    return 0 if report.is_equal else 1
