"""What an operator may do beside an autoscaler."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from headrace.cluster.autoscale import Autoscaling
from headrace.cluster.roles import SetWorkerRole
from headrace.cluster.wire import RoleIs
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Loop,
    Reason,
    RoleSwitched,
    SwitchRole,
    Tick,
)
from headrace.core.base.errors import RequestError
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.front import FrontCore
from unit.cluster.test_crew import Rig, ready

LAST = WorkerId(2)
REASON = Reason(loop=Loop.SWITCH, num_wanted=2)


class Switching:
    """A scaler that has the last worker compute prompts, and says no more."""

    def __init__(self) -> None:
        self.events: list[AutoscalerEvent] = []

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        self.events.append(event)
        return [SwitchRole(LAST, Role.DECODE, Role.PREFILL, REASON)] if event == Tick() else []


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.crew.end()


def test_no_worker_is_moved_twice_at_once(rig: Rig) -> None:
    """The scaler would never hear of the first move if the second one took it back at once."""
    slots = [rig.come(role)[0] for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    for slot in slots:
        rig.say(slot, ready(role=slot.role))
    core = FrontCore(RouterCore(RouterConfig()), ClusterConfig())
    scaler = Switching()
    scaling = Autoscaling(rig.crew, core, lambda replicas: scaler, Slo())
    scaling.turn(rig.now)
    assert slots[2].asked_role is Role.PREFILL

    def ask(name: str) -> Future[None]:
        wish = SetWorkerRole(name, Role.DECODE, Future())
        if scaling.allows(wish):
            rig.crew.roles.ask(wish)
        return wish.done

    error = ask("box-2").exception(0)
    assert isinstance(error, RequestError)
    assert (error.status_hint, "is changing its role already" in error.message) == (409, True)
    assert not ask("box-0").done()
    rig.say(slots[2], RoleIs(Role.PREFILL))
    scaling.turn(rig.now)
    assert scaler.events[-1] == RoleSwitched(LAST, Role.DECODE, Role.PREFILL)
    assert not ask("box-2").done()
