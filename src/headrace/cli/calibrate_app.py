"""`headrace calibrate`: what it takes, and its help."""

from typing import Annotated

from cyclopts import Parameter

from headrace.cli.flags import Json, Model


def calibrate(
    model: Model = None,
    *,
    from_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--from",
            metavar="LOG",
            negative="",
            help="event log of an engine; once for each worker that shared the machine; none = "
            "serve a load of its own",
            show_default=False,
        ),
    ] = (),
    out: Annotated[
        str | None, Parameter(metavar="FILE", help="where to write it", show_default=False)
    ] = None,
    serve: Annotated[
        str, Parameter(help="arguments of the server that is measured: --serve='--workers 3'")
    ] = "",
    passes: Annotated[int, Parameter(help="of the load, half a minute each and worker")] = 1,
    json: Json = False,
) -> int:
    """Fit a cost model to an engine's steps, for `headrace sim --cost FILE`.

    Prints what steps take, what passes around them, how workers slow each other down, how far the
    fit is off at steps that it has not seen, and how large the steps were.
    """
    from headrace.cli.calibrate import calibrate as command

    return command(model, from_, serve=serve, passes=passes, out=out, as_json=json)
