"""From a configuration to a cluster that answers.

The front end has the text and the workers have the weights.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.cluster.autoscale import make_scaler
from headrace.cluster.fleet import Fleet, Slot
from headrace.cluster.front import ClusterEngine
from headrace.cluster.placement.port import Placer
from headrace.cluster.process import WORKER
from headrace.cluster.site import Site, open_site
from headrace.cluster.states import awaited
from headrace.cluster.wire import Configure, Ready
from headrace.core.base.errors import ConfigError
from headrace.core.config.ledger import ByteLedger, KvPlan
from headrace.core.config.scaling import scaling_faults
from headrace.core.config.schema import Config, RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.pricing import AUTO_LINK
from headrace.core.workload.recording import Begin
from headrace.live.boot import WAIT, Progress, identity_of, model_facts, template_path
from headrace.live.generate import TextEngine
from headrace.live.traffic import Facts
from headrace.models.hub import resolve_model
from headrace.models.load import LoadedText, ModelDescription, load_text
from headrace.models.text.template import ChatTemplate

PROGRESS_S = 0.1
NOTE_AFTER_S = 5.0  # a start that is quicker is not worth a word
NOTE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BootedCluster:
    """A model that answers from several processes."""

    ready: list[Ready]  # what each worker serves with
    text: LoadedText
    engine: ClusterEngine
    text_engine: TextEngine
    close: Callable[[], None]
    """End what runs and all processes. Idempotent."""

    @property
    def name(self) -> str:
        return self.config.model.name

    @property
    def config(self) -> Config:
        """Nothing in it is open; every worker has the same."""
        return self.ready[0].config

    @property
    def kv(self) -> KvPlan:
        """Of each worker."""
        return self.ready[0].kv

    @property
    def ledger(self) -> ByteLedger:
        """Of each worker."""
        return self.ready[0].kv.ledger

    @property
    def description(self) -> ModelDescription:
        return self.ready[0].description

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.text.chat_template

    @property
    def identity(self) -> str:
        """Changes with everything that may change an answer's bytes, the program apart."""
        return identity_of(self.ready[0].spec)

    def facts(self) -> Facts:
        """For a recording of its traffic."""
        config = self.config
        return Facts(
            begin=Begin(
                block_tokens=self.ready[0].spec.block_size,
                model=model_facts(self.description),
                router=_router(config),
                handoff=config.cluster.handoff,
                handoff_ms=config.cluster.handoff_ms,
                handoff_neighbour_weight=config.cluster.handoff_neighbour_weight,
                max_migrations=config.cluster.max_migrations,
                slo=config.telemetry.slo,
            ),
            look=self.engine.pool_facts,
        )


def boot_cluster(
    config: Config,
    *,
    on_progress: Progress | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
    on_look: Callable[[str], None] = lambda text: None,
    placer: Placer | None = None,
    worker_module: str = WORKER,
) -> BootedCluster:
    """Start the workers of `config.cluster` and wait until all are ready; `on_look` hears again and
    again what is waited for, `on_wait` now and then, where that takes long. `placer` stands for the
    cluster that they are to run on, `worker_module` for the program of those that run here. Raises
    ConfigError.
    """
    if (config.autoscaler.enabled or config.cluster.on) and not config.cluster.num_workers:
        config = replace(config, cluster=replace(config.cluster, workers=1))
    _check(config)
    report = on_progress or (lambda stage, done, total: None)
    with ExitStack() as stack:
        site = open_site(config, placer, worker_module=worker_module)
        stack.callback(site.close)
        path = resolve_model(config.model.path, partial(report, "fetch"))
        progress = [("load", 0, 0)]  # the last of it; the engine's thread tells, this one reports
        engine = _engine(config, site, path, lambda *news: progress.__setitem__(0, news))
        stack.callback(engine.close)
        # While the workers load, in processes of their own.
        text = load_text(path, chat_template=template_path(config.model))
        stack.callback(text.close)

        def look() -> str:
            report(*_stage(engine, progress[0]))
            text = awaited(engine.workers(), config.cluster)
            on_look(text)
            return text

        ready = _wait(engine, look, on_wait)
        spec = ready[0].spec
        text_engine = TextEngine(
            engine, text.tokenizer, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size
        )
        return BootedCluster(
            ready=ready,
            text=text,
            engine=engine,
            text_engine=text_engine,
            close=stack.pop_all().close,
        )


def _wait(
    engine: ClusterEngine, look: Callable[[], str], on_wait: Callable[[str], None]
) -> list[Ready]:
    note_s = time.monotonic() + NOTE_AFTER_S
    while (ready := engine.wait_ready(PROGRESS_S)) is None:
        text = look()
        if text and time.monotonic() >= note_s:
            on_wait(text)
            note_s = time.monotonic() + NOTE_EVERY_S
    return ready


def _engine(config: Config, site: Site, path: Path, on_progress: Progress) -> ClusterEngine:
    here = replace(config, model=replace(config.model, path=str(path)))

    def configure(slot: Slot) -> Configure:
        # Another machine may have the model elsewhere, if it has the same name for it.
        is_elsewhere = slot.is_remote or bool(config.cluster.on)
        return _configure(config if is_elsewhere else here, slot)

    slo = config.telemetry.slo
    return ClusterEngine(
        config.cluster,
        Fleet(config.cluster, configure, site.launch, start_timeout_s=site.start_timeout_s),
        RouterCore(_router(config)),
        door=site.door,
        on_progress=on_progress,
        drain_timeout_s=config.server.drain_timeout_s,
        scaler=make_scaler(config.autoscaler, slo) if config.autoscaler.enabled else None,
        slo=slo,
    )


def _stage(engine: ClusterEngine, progress: tuple[str, int, int]) -> tuple[str, int, int]:
    """What is waited for: workers that have not come, or those that load."""
    workers = engine.workers()
    num_there = sum(worker.has_come for worker in workers)
    if num_there < max(1, len(workers)):
        return WAIT, num_there, len(workers)
    return progress


def _router(config: Config) -> RouterConfig:
    return replace(config.router, kv_link=config.router.kv_link or AUTO_LINK)


def _check(config: Config) -> None:
    cluster = config.cluster
    if not (cluster.workers + cluster.decode or cluster.listen):
        raise ConfigError(
            "there is no worker that decodes",
            hint="add --decode 1 or --workers 1, or --listen for workers of other machines",
        )
    if not config.autoscaler.enabled:
        return
    if fault := next(scaling_faults(config, {}), ""):
        raise ConfigError(fault)
    if cluster.listen and not cluster.on:
        raise ConfigError(
            "workers that come by themselves cannot be scaled",
            hint="leave out --autoscale, or --listen",
        )
    kinds = cluster.workers > 0, cluster.prefill > 0, cluster.decode > 0
    if kinds not in ((True, False, False), (False, True, True)):
        raise ConfigError(
            "autoscaling needs workers of one kind, or prefill and decode workers",
            hint="begin with --workers 1 alone, or with --prefill 1 --decode 1",
        )


def _most_workers(config: Config) -> int:
    """That share a machine, at once: each has as much of it as if all were there."""
    if config.autoscaler.enabled:
        return max(config.cluster.num_workers, config.autoscaler.max_replicas)
    return config.cluster.num_workers


def _configure(config: Config, slot: Slot) -> Configure:
    """What a worker is told; each life has an event log of its own."""
    telemetry = config.telemetry
    if telemetry.event_log:
        log = f"{telemetry.event_log}.{slot.name}.{slot.num_starts}"
        telemetry = replace(telemetry, event_log=log)
    return Configure(
        config=replace(config, telemetry=telemetry),
        role=slot.role,
        num_sharing=1 if slot.is_remote else _most_workers(config),
    )
