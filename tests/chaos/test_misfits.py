"""Workers that could not take over from the others come, and are sent away with a word (F09)."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_faults import num_ready, settle
from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config
from support import tiny_model
from support.remote_worker import free_ports, listening, remote_worker
from support.tiny_model import write_tiny_model

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

# A worker that serves with something else than it was told.
_OTHERWISE = """
from dataclasses import replace
from headrace.cluster import shared
import msgspec
boot = shared.boot
says = lambda booted: booted
def boot_otherwise(config, **names):
    return says(boot(otherwise(config), **names))
shared.SharedEngine.__init__.__defaults__ = (boot_otherwise,)
"""
INT8 = """
otherwise = lambda config: replace(config, kv=replace(config.kv, dtype="int8"))
"""
LONG_BLOCKS = """
otherwise = lambda config: config
says = lambda booted: replace(booted, spec=msgspec.structs.replace(booted.spec, block_size=32))
"""
OTHER_MODEL = """
otherwise = lambda config: replace(config, model=replace(config.model, path=PATH))
"""


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, port: int) -> Config:
    folder = tmp_path_factory.mktemp("model")
    cluster = listening(
        folder,
        port,
        handoff="always",
    )
    return replace(tiny_config(folder), cluster=cluster)


@pytest.fixture(scope="module")
def cluster(config: Config, port: int) -> Iterator[BootedCluster]:
    with ExitStack() as stack:
        stack.enter_context(remote_worker(port, role="decode", name="right"))
        cluster = boot_cluster(config)
        stack.callback(cluster.close)
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has a layer more, and is like the others' otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "LAYERS", tiny_model.LAYERS + 1)
        return write_tiny_model(tmp_path_factory.mktemp("other") / "tiny.gguf")


@pytest.mark.parametrize(
    ("otherwise", "differs"),
    [
        pytest.param(INT8, ("KV in bf16", "KV in int8"), id="another KV type"),
        pytest.param(LONG_BLOCKS, ("16 tokens", "32 tokens"), id="another block size"),
        pytest.param(OTHER_MODEL, ("", ""), id="another number of layers"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_another_kind_is_refused_and_told_what_differs(
    config: Config,
    port: int,
    cluster: BootedCluster,
    model: Path,
    caplog: pytest.LogCaptureFixture,
    otherwise: str,
    differs: tuple[str, str],
    role: str,
) -> None:
    hook = _OTHERWISE + otherwise.replace("PATH", repr(str(model)))
    asked = requests(2)
    wanted = undisturbed(config, asked)
    with remote_worker(port, role=role, name="odd", before=hook) as odd:
        assert answers(cluster.text_engine, asked) == wanted  # before it has come, or while
        assert odd.wait(60) != 0
        assert odd.stderr is not None
        said = odd.stderr.read()
    found = re.search(r"does not want this worker: it serves (.*), the others (.*)", said)
    assert found is not None, said
    served, ours = found.groups()
    assert ours == cluster.ready[0].kind
    if otherwise is OTHER_MODEL:  # all that is said of a model is its digest
        (digest,) = set(re.findall("[0-9a-f]{12}", served))
        differs = (cluster.ready[0].spec.model_digest[:12], digest)
    assert served != ours
    assert served == ours.replace(*differs)
    wait_until(lambda: f"is lost: it serves {served}, the others {ours}" in caplog.text)
    assert num_ready(cluster) == 1
    assert answers(cluster.text_engine, asked) == wanted
    settle(cluster)
