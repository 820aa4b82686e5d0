"""`headrace plan`: its questions, what they take, and their help."""

from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.plan_flags import AnswerFlags, LayoutFlags, TargetFlags, WorkloadFlags

plan = App(name="plan", help="Answer capacity questions: before there is a device to ask.")

Preset = Annotated[
    str | None,
    Parameter(
        name="--preset",
        help="fixed constants instead of these flags; a wrong name lists all",
        show_default=False,
    ),
]


@plan.command
def roofline(
    *,
    preset: Preset = None,
    batch: Annotated[
        int | None, Parameter(help="sequences in the batch; none = 8", show_default=False)
    ] = None,
    target: TargetFlags | None = None,
    layout: LayoutFlags | None = None,
    workload: WorkloadFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Say which resource is the wall for prefill and decode, and what TTFT, TPOT and E2E follow."""
    from headrace.cli.plan_roofline import roofline as command

    return command(preset, batch, target, layout, workload, answer or AnswerFlags())
