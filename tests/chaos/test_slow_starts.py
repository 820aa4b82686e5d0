"""Workers that take long to load, on a machine that lets them do nothing else meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_workers import answers, requests, tiny_config, undisturbed
from headrace.cluster import boot as cluster_boot
from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig
from support.frozen_worker import FROZEN_S

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


def test_who_loads_is_not_taken_for_silent_and_people_hear_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_boot, "NOTE_AFTER_S", 1.5)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    config = tiny_config(tmp_path)
    asked = requests(2)
    wanted = undisturbed(config, asked)
    patient = replace(config, cluster=ClusterConfig(workers=1, silence_timeout_s=FROZEN_S / 3))
    notes: list[str] = []
    looks: list[str] = []
    cluster = boot_cluster(
        patient,
        on_wait=notes.append,
        on_look=looks.append,
        worker_module="support.frozen_worker",
    )
    try:
        (worker,) = cluster.engine.workers()
        assert (worker.num_starts, worker.losses, worker.stage) == (1, {}, "")
        assert notes == ["w0 loads the model (25%)"]
        assert set(notes) < set(looks)
        assert answers(cluster.text_engine, asked) == wanted
    finally:
        cluster.close()


def test_of_a_quick_start_nobody_hears(tmp_path: Path) -> None:
    notes: list[str] = []
    boot_cluster(tiny_config(tmp_path), on_wait=notes.append).close()
    assert notes == []
