"""The console script: runs a command and turns what went wrong into one line and an exit code.

0 done · 1 the answer is bad, or headrace failed · 2 the operator must change something · 130 Ctrl-C
"""

import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace import __version__

# The extension lacks a name, or takes other arguments.
_OTHER_BUILD = re.compile(r"\b_native\b|incompatible function arguments")
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONG_RUNNING = ("serve", "worker")  # commands that run until they are told to end


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and never raises."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    # Asked often, by scripts: answered before anything else is imported.
    if tokens == ["--version"]:
        print(f"headrace {__version__}")
        return 0
    is_long = arguments is None and tokens[:1] and tokens[0] in LONG_RUNNING
    if is_long:
        _end_on_signals()
    is_debug = os.environ.get("HEADRACE_DEBUG", "") not in ("", "0")
    if "--debug" in tokens:
        tokens.remove("--debug")
        is_debug = True
    _open_streams()
    try:
        from headrace.cli.app import run

        return run(tokens)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has had enough. Nothing more may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if is_debug:
            import traceback

            traceback.print_exc()
        return _report(error)
    finally:
        if is_long:
            # Python's own end takes a while, and the default of a signal would be its exit status.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _open_streams() -> None:
    """Streams that were closed before Python began are None, which nobody expects."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def _end_on_signals() -> None:
    """Until the command itself knows what to do with a signal, whoever is told to end just ends:
    by an exception, and told again, without any more of it.
    """
    is_told = False

    def end(*_: object) -> None:
        nonlocal is_told
        if is_told:
            os._exit(0)
        is_told = True
        raise SystemExit(0)

    def lost(fault: "sys.UnraisableHookArgs") -> None:
        # In a callback of the import system, say, from which no exception comes through.
        if fault.exc_type is SystemExit:
            os._exit(0)
        sys.__unraisablehook__(fault)

    sys.unraisablehook = lost
    for number in _SIGNALS:
        signal.signal(number, end)


def _report(error: Exception) -> int:
    from cyclopts.exceptions import CycloptsError

    from headrace.cli.output import report_error
    from headrace.core.base.errors import ConfigError, HeadraceError, RequestError

    if isinstance(error, CycloptsError):
        from headrace.cli.app import wording

        report_error(wording(error))
        return WRONG_USE
    if isinstance(error, HeadraceError):
        report_error(str(error))
        return WRONG_USE if isinstance(error, ConfigError | RequestError) else FAILED
    if isinstance(error, OSError) and error.filename is not None:
        report_error(f"{error.filename}: {(error.strerror or str(error)).lower()}")
        return FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        report_error(f"cannot write: {(error.strerror or str(error)).lower()}")
        return FAILED
    if isinstance(error, AttributeError | TypeError) and _OTHER_BUILD.search(str(error)):
        report_error(
            f"the native backend was built from other sources: {str(error).splitlines()[0]}\n"
            "hint: build it again, with pip install . in headrace's checkout"
        )
        return WRONG_USE
    report_error(
        f"unexpected {type(error).__name__}: {error}\n"
        "hint: this is a fault of headrace; --debug shows where it happened"
    )
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
