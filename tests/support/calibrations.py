"""Calibrations that nobody measured, and logs of engines that never ran, with known costs."""

from pathlib import Path
from random import Random
from typing import Any

from headrace.core.base.events import Arrive
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.calibration import Calibration, HeldOut, Host, Line, SeenShapes
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape
from headrace.live.event_log import EventLogWriter, LogHeader
from headrace.sim.world import WorkerSetup, World, simulate

SPEC = WorkerSpec(
    model_digest="00" * 32,
    kv_dtype="bf16",
    block_size=16,
    num_blocks=4096,
    max_model_len=4096,
    vocab_size=1000,
)


def calibration_of(**fields: Any) -> Calibration:
    """Of two workers that share a machine."""
    known: dict[str, Any] = {
        "headrace_version": "0",
        "machine": "a test",
        "num_workers": 2,
        "source": "nothing",
        "config": WorkerConfig(),
        "spec": SPEC,
        "steps": FittedCostModel.prior(),
        "believed": FittedCostModel.prior(),
        "host_share": 0.01,
        "host": Host(request=Line(5e6, 1e3), first_token_ns=6e6, token_ns=2e6, has_client=True),
        "slow_down": (1.0, 1.5),
        "seen": SeenShapes(StepShape(512, 16, 16, 200_000, 4000), 2),
        "held_out": HeldOut(num_steps=10, mean=0.1, p50=0.1, p95=0.3, bias=0.0),
    }
    return Calibration(**{**known, **fields})


def write_log(path: Path, *, num_seqs: int = 40, come_ns: int = 5_000_000, seed: int = 1) -> None:
    """Of an engine whose steps take what the prior says, and to which requests take `come_ns`."""
    rng = Random(seed)
    inputs: list[tuple[Ns, Arrive]] = []
    now = 10_000_000
    for number in range(num_seqs):
        now += rng.randrange(400_000_000)
        spec = SeqSpec(
            seq_id=SeqId(number),
            request_id=f"r{number}",
            prompt_tokens=tuple(rng.choices(range(1000), k=rng.choice((20, 90, 300, 700)))),
            params=SamplingParams(max_tokens=rng.randrange(2, 40), ignore_eos=True),
            arrived_ns=Ns(now - come_ns),
        )
        inputs.append((Ns(now), Arrive((spec,))))
    config, cost = WorkerConfig(), FittedCostModel.prior()
    setup = WorkerSetup(config=config, spec=SPEC, cost=cost, inputs=inputs)
    writer = EventLogWriter(path, LogHeader(config=config, spec=SPEC, cost=cost))
    simulate(
        World(workers=(setup,)),
        lambda _, at_ns, event, effects: writer.write(at_ns, event, effects),
    )
    writer.close()
