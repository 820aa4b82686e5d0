"""The commands, what they take, and their help."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnusedCliTokensError

from headrace import __version__
from headrace.cli.bench_app import bench
from headrace.cli.calibrate_app import calibrate
from headrace.cli.flags import AllFlags, EngineFlags, Json, Model
from headrace.cli.output import HELP_WIDTH, console
from headrace.cli.plan_app import plan
from headrace.cli.sampling import SamplingFlags
from headrace.cli.sim_app import sim
from headrace.cli.whole import convert_strictly
from headrace.core.base.errors import RequestError

System = Annotated[
    str | None, Parameter(name="--system", help="system message", show_default=False)
]

app = App(
    name="headrace",
    help="Serves large language models. COMMAND --help tells more.",
    help_epilogue="--debug, or HEADRACE_DEBUG=1, shows the traceback of an error.",
    help_format="plaintext",
    default_parameter=Parameter(converter=convert_strictly),
    version=f"headrace {__version__}",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
explain = App(name="explain", help="Say why things are as they are.")
app.command(explain)
app.command(bench)
app.command(calibrate)
app.command(plan)
app.command(sim)


def run(tokens: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises what the command raises, and
    CycloptsError for words that are no command line.
    """
    code = app(list(tokens), console=console(plain_width=HELP_WIDTH))
    return code if isinstance(code, int) else 0


def wording(error: CycloptsError) -> str:
    """The library's message in our form: lower case, no full stop."""
    match error:
        case UnknownCommandError(unused_tokens=[first, *_]) if first.startswith("-"):
            return f"unknown option {first}"
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"unexpected argument {first}"
    text = " ".join(str(error).split()).rstrip(".")
    return text[:1].lower() + text[1:]


@app.command
def serve(model: Model = None, *, json: Json = False, flags: AllFlags = None) -> int:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    The default model is fetched on first use. Requests under way are finished before the end; a
    second signal ends at once.
    """
    from headrace.cli.serve import serve as command

    return command(model, flags, as_json=json)


@app.command
def worker(
    *,
    connect: Annotated[
        list[str],
        Parameter(
            name="--connect",
            metavar="HOST:PORT",
            negative="",
            help="where a front end listens; again for each further one",
        ),
    ],
    secret_file: Annotated[
        str,
        Parameter(name="--secret-file", metavar="FILE", help="the secret that it has too"),
    ],
    role: Annotated[
        str, Parameter(name="--role", metavar="ROLE", help="mixed, prefill or decode")
    ] = "mixed",
    name: Annotated[
        str,
        Parameter(
            name="--name", metavar="NAME", help="for people; this machine's", show_default=False
        ),
    ] = "",
    drain_timeout_s: Annotated[
        float,
        Parameter(
            name="--drain-timeout-s",
            metavar="SECONDS",
            help="after SIGTERM, how long answers may go on here before they do elsewhere",
        ),
    ] = 30.0,
) -> int:
    """Work for a front end on another machine, which says what model it serves, or for several.

    It comes again when a front end is lost, until it is stopped. After SIGTERM or Ctrl-C it takes
    nothing new, and ends when all that it has begun is done; a second signal ends it at once.
    """
    from headrace.cli.worker import worker as command

    command(connect, secret_file, role=role, name=name, drain_timeout_s=drain_timeout_s)
    return 0


@app.command
def chat(
    model: Model = None,
    *,
    system: System = None,
    sampling: SamplingFlags | None = None,
    flags: EngineFlags = None,
) -> int:
    """Talk to a model in this terminal; /help lists what else can be said.

    Each line of standard input is a message, so `echo hello | headrace chat` prints the answer.
    """
    from headrace.cli.chat import chat as command

    return command(model, flags, sampling or SamplingFlags(), system=system)


@app.command
def generate(
    prompt: Annotated[
        str | None, Parameter(help="the message; none = all of standard input")
    ] = None,
    /,
    model: Model = None,
    *,
    system: System = None,
    raw: Annotated[
        bool,
        Parameter(
            name="--raw",
            negative="",
            help="continue the text itself, without the chat template",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
    sampling: SamplingFlags | None = None,
    flags: EngineFlags = None,
) -> int:
    """Print the answer to one prompt."""
    from headrace.cli.generate import generate as command

    if raw and system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out")
    return command(
        prompt,
        model,
        flags,
        sampling or SamplingFlags(),
        system=system,
        is_raw=raw,
        as_json=json,
    )


@app.command
def pull(model: Model = None, *, json: Json = False) -> int:
    """Fetch a model into the cache and print where it lies."""
    from headrace.cli.pull import pull as command

    return command(model, as_json=json)


@app.command
def top(
    url: Annotated[str, Parameter(help="address of a server")] = "http://127.0.0.1:8000",
    /,
    *,
    every: Annotated[
        float, Parameter(name="--every", metavar="SECONDS", help="time between two looks")
    ] = 1.0,
    once: Annotated[
        bool, Parameter(name="--once", negative="", help="look once", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Show what a running server does, live; once where standard output is no terminal."""
    from headrace.cli.top import top as command

    return command(url, every_s=every, is_once=once, as_json=json)


@app.command
def role(
    worker: Annotated[str, Parameter(help="its name, as `headrace top` shows it")],
    kind: Annotated[str, Parameter(name="ROLE", help="mixed, prefill or decode")],
    url: Annotated[str, Parameter(help="address of a server")] = "http://127.0.0.1:8000",
    /,
    *,
    json: Json = False,
) -> int:
    """Let a worker of a running server be for something else, while it runs."""
    from headrace.cli.role import role as command

    return command(worker, kind, url, as_json=json)


@app.command
def doctor(model: Model = None, *, json: Json = False, flags: AllFlags = None) -> int:
    """Say what fits this machine and what looks wrong; exit code 1 if something cannot work."""
    from headrace.cli.doctor import doctor as command

    return command(model, flags, as_json=json)


@explain.command(name="config")
def explain_config(model: Model = None, *, json: Json = False, flags: AllFlags = None) -> int:
    """Print every setting with its value and where that comes from, as `serve` would take it."""
    from headrace.cli.explain import explain_config as command

    return command(model, flags, as_json=json)


@app.command
def replay(
    log: Annotated[str, Parameter(help="file written with --event-log")],
    /,
    *,
    json: Json = False,
) -> int:
    """Run a recorded event log again; exit code 1 if a decision is not as recorded."""
    from headrace.cli.replay import replay as command

    return command(log, as_json=json)
