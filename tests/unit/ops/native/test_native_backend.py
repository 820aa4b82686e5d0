"""Settings, faults and threads of the native backend."""

import mmap
import re
import resource
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import ConfigError, DeviceError
from headrace.core.config.resolve import MachineFacts, resolve
from headrace.core.config.schema import Config
from headrace.live.machine import usable_isas
from headrace.ops.interface import AttentionSpec, KvLayout, KvType, Rope, TensorView, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend, default_threads
from support.ops_rig import apply, batch_of, compile_rows, run, view_of

ROWS = np.eye(8, 16, dtype=np.float32)
KV = KvLayout(1, 1, 8, 4)


@pytest.mark.parametrize(
    "settings", [{"isa": "mmx"}, {"activations": "fp8"}, {"threads": -1}, {"threads": 1025}]
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NativeBackend(**settings)


def test_a_backend_that_is_told_nothing_computes_as_a_server_that_is_told_nothing() -> None:
    isas = usable_isas()
    for isa in isas:
        machine = MachineFacts(num_cores=1, total_bytes=1, available_bytes=1, isas=(isa,))
        device = resolve(Config(), machine).config.device
        told = NativeBackend(1, device.isa, device.activations, device.attention)
        assert NativeBackend(1, isa).arithmetic == told.arithmetic
    assert NativeBackend(1).isa == isas[0]


def test_threads_default_to_the_cpus_of_the_process() -> None:
    assert NativeBackend().threads == default_threads() >= 1
    assert NativeBackend(threads=3).threads == 3


def test_weights_keep_their_own_type_in_memory() -> None:
    backend = NativeBackend(1)
    backend.load_weight(view_of(np.ones((64, 320), np.float32), WeightType.Q4_1))
    assert backend.weight_bytes() == 64 * 320 // 32 * 20
    backend.load_weight(view_of(np.ones((16, 8), np.float32), WeightType.F16))
    assert backend.weight_bytes() == 64 * 320 // 32 * 20 + 16 * 8 * 2


@pytest.mark.parametrize("type", list(WeightType))
def test_weights_take_about_the_bytes_of_their_file(type: WeightType) -> None:
    backend, view = NativeBackend(1), view_of(np.ones((64, 512), np.float32), type)
    backend.load_weight(view)
    assert len(view.data) <= backend.weight_bytes() <= 1.03 * len(view.data)


def test_a_width_that_is_no_multiple_of_a_block_is_named() -> None:
    view = TensorView("w", WeightType.Q4_K, 1, 576, memoryview(bytes(2 * 144)))
    with pytest.raises(DeviceError, match="blocks of 256 needs a multiple of 256 columns, got 576"):
        NativeBackend(1).load_weight(view)


def test_a_weight_need_not_outlive_its_loading() -> None:
    backend = NativeBackend(1)
    data = bytearray(view_of(ROWS).data)
    handle = backend.load_weight(TensorView("w", WeightType.F32, 8, 16, memoryview(data)))
    data[:] = bytes(len(data))
    program = backend.compile(lambda ops: ops.select_logit_rows(ops.embed(handle)), KV, 8)
    assert (run(program, batch_of((range(8), 0, [0]))) == ROWS).all()


def test_weights_that_share_pages_do_not_share_bytes() -> None:
    """Those that are left keep their values when others go, and when new ones come."""
    backend = NativeBackend(1)

    def load(factor: float) -> tuple[float, _native.Weight]:
        return factor, backend.load_weight(view_of(factor * ROWS))

    handles = [load(i) for i in range(1, 8)]
    del handles[1::2]
    handles += [load(i) for i in range(8, 12)]
    for factor, handle in handles:
        program = backend.compile(lambda ops: ops.select_logit_rows(ops.embed(handle)), KV, 8)  # noqa: B023
        assert (run(program, batch_of((range(8), 0, [0]))) == factor * ROWS).all()


def test_many_small_weights_take_large_pages() -> None:
    """Reading a model is then not held up at each 4 KiB."""
    rollup = Path("/proc/self/smaps_rollup")

    def large_bytes() -> int:
        found = re.search(r"AnonHugePages: +([0-9]+) kB", rollup.read_text())
        return int(found[1]) << 10 if found else 0

    num_bytes = 32 << 20
    if not rollup.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no large pages")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, num_bytes, flags=private) as asked:
        before = large_bytes()
        asked.madvise(mmap.MADV_HUGEPAGE)
        asked.write(bytes(num_bytes))
        if large_bytes() - before < num_bytes // 2:
            pytest.skip("this system gives no large pages")

    before = large_bytes()
    backend = NativeBackend(1)
    view = view_of(np.ones((256, 512), np.float32))
    weights = [backend.load_weight(view) for _ in range(64)]
    assert large_bytes() - before >= num_bytes // 2
    del weights


def test_blocks_are_readied_behind_those_in_use_and_change_nothing() -> None:
    """2 MiB a time, 256 blocks ahead of the last one that a step has used."""
    backend = NativeBackend(1)
    handle = backend.load_weight(view_of(ROWS))
    kv = KvLayout(4, 4, 64, 512)  # 64 KiB a block
    program = backend.compile(lambda ops: ops.select_logit_rows(ops.embed(handle)), kv, 8)
    assert [program.ready_blocks() for _ in range(9)] == [True] * 7 + [False] * 2
    rows = run(program, batch_of((range(8), 0, [100])))
    assert (rows == ROWS).all()
    # To the end of block 357, in the 12th page.
    assert [program.ready_blocks() for _ in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("rows", "cols", "type", "num_bytes"),
    [
        (8, 16, WeightType.F32, 8 * 16 * 4 - 1),
        (8, 16, WeightType.F32, 8 * 16 * 4 + 1),
        (8, 16, WeightType.F16, 8 * 16 * 4),
        (8, 33, WeightType.Q8_0, 8 * 34),
        (8, 576, WeightType.Q5_K, 8 * 2 * 176),
        (0, 16, WeightType.F32, 0),
    ],
)
def test_weights_of_the_wrong_size(rows: int, cols: int, type: WeightType, num_bytes: int) -> None:
    view = TensorView("w", type, rows, cols, memoryview(bytes(num_bytes)))
    with pytest.raises(DeviceError):
        NativeBackend(1).load_weight(view)


SPEC = AttentionSpec(2, 1, 8, 1.0)
ROPE = Rope((1.0, 0.5, 0.25, 0.125), True)
WRONG_MODELS: dict[str, Any] = {
    "norm of another width": lambda ops, x, w: ops.rms_norm(x, w["short"], 1e-5),
    "norm by a matrix": lambda ops, x, w: ops.rms_norm(x, w["square"], 1e-5),
    "linear of another width": lambda ops, x, w: ops.linear(x, (w["short"],)),
    "linear of nothing": lambda ops, x, w: ops.linear(x, ()),
    "too few biases": lambda ops, x, w: ops.linear(x, (w["square"],) * 2, (None,)),
    "bias of another width": lambda ops, x, w: ops.linear(x, (w["square"],), (w["short"],)),
    "add of other shapes": lambda ops, x, w: ops.add(x, ops.silu_mul(x)),
    "attention of another width": lambda ops, x, w: ops.attention(x, 0, SPEC, ROPE),
    "layer that is not there": lambda ops, x, w: ops.attention(
        ops.linear(x, (w["square"],) * 2), 1, SPEC, ROPE
    ),
    "heads that do not divide": lambda ops, x, w: ops.attention(
        x, 0, AttentionSpec(0, 1, 8, 1.0), ROPE
    ),
    "too few frequencies": lambda ops, x, w: ops.attention(
        ops.linear(x, (w["square"],) * 2), 0, SPEC, Rope((1.0,), True)
    ),
    "rows selected twice": lambda ops, x, w: ops.select_logit_rows(x),
    "no such register": lambda ops, x, w: 99,
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_models_that_do_not_fit_together(name: str) -> None:
    weights = {
        "short": view_of(np.ones((1, 8), np.float32)),
        "square": view_of(np.ones((16, 16), np.float32)),
    }

    def body(ops: Any, x: Any, w: Any) -> Any:
        out = WRONG_MODELS[name](ops, x, w)
        return ops.select_logit_rows(out) if name == "rows selected twice" else out

    with pytest.raises(DeviceError):
        compile_rows(NativeBackend(1), body, ROWS, weights, KV)


@pytest.mark.parametrize(
    "kv",
    [
        KvLayout(0, 1, 8, 4),
        KvLayout(1, 1, 7, 4),
        KvLayout(1, 1, 258, 4),
        KvLayout(1, 1, 8, 0),
        KvLayout(1, 1, 8, 4, block_size=32),
        KvLayout(1000, 1000, 256, 2**31 - 1),  # more bytes than there are
    ],
)
def test_kv_pools_that_cannot_be(kv: KvLayout) -> None:
    with pytest.raises(DeviceError):
        compile_rows(NativeBackend(1), lambda ops, x, w: x, ROWS, kv=kv)


@pytest.mark.parametrize("kv_type", list(KvType))
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_the_pool_is_as_large_as_the_layout_says(kv_type: KvType, dim: int) -> None:
    layout = KvLayout(3, 2, dim, 5, dtype=kv_type)
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.num_blocks)
    program = _native.Program(
        _native.Pool(1), "portable", False, False, False, False, *shape, kv_type.value, 8
    )
    assert program.kv_bytes == layout.num_blocks * layout.block_bytes


def test_a_kv_type_that_there_is_not() -> None:
    with pytest.raises(_native.Fault, match="bf16, int8 or fp8, not as f16"):
        _native.Program(
            _native.Pool(1), "portable", False, False, False, False, 1, 1, 8, 4, "f16", 8
        )


def test_logits_must_be_of_selected_rows() -> None:
    backend = NativeBackend(1)
    table = backend.load_weight(view_of(ROWS))
    with pytest.raises(DeviceError, match="select_logit_rows"):
        backend.compile(lambda ops: ops.embed(table), KV, 8)


@pytest.mark.parametrize("starts", [[0, 2, 1, 3], [0, 0, 3, 3], [1, 2, 3]])
def test_token_starts_out_of_order(starts: list[int]) -> None:
    program = compile_rows(NativeBackend(1), lambda ops, x, w: x, ROWS, kv=KV)
    batch = batch_of(([0], 0, [0]), ([1], 0, [1]), ([2], 0, [2]))
    with pytest.raises(DeviceError):
        program.run(
            type(batch)(
                batch.tokens,
                starts,
                [0] * (len(starts) - 1),
                batch.block_tables[: len(starts) - 1],
                [0],
            )
        )


@pytest.mark.parametrize("position", [-1, 2**31, 2**30 + 1])
def test_positions_out_of_range(position: int) -> None:
    program = compile_rows(NativeBackend(1), lambda ops, x, w: x, ROWS, kv=KV)
    with pytest.raises(DeviceError):
        program.run(batch_of(([0], position, [0])))


def test_tuples_lists_ranges_and_buffers_are_all_sequences() -> None:
    program = compile_rows(NativeBackend(1), lambda ops, x, w: x, ROWS, kv=KV)
    batch = batch_of(([3, 1], 0, [0]))
    makers: tuple[Any, ...] = (
        list,
        tuple,
        lambda values: array("q", values),
        lambda v: memoryview(array("i", v)),
    )
    for make in makers:
        step = type(batch)(
            make(batch.tokens),
            make(batch.token_starts),
            make(batch.positions),
            [make(table) for table in batch.block_tables],
            make(batch.logit_rows),
        )
        assert (run(program, step) == ROWS[[3, 1]]).all()


def test_several_programs_share_the_threads() -> None:
    """Two callers at once: the pool serves one job after another and mixes nothing up."""
    backend = NativeBackend(threads=3)
    weight = {"w": view_of(np.random.default_rng(0).standard_normal((640, 320)).astype(np.float32))}
    x = np.random.default_rng(1).standard_normal((64, 320)).astype(np.float32)
    programs = [
        compile_rows(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), x * scale, weight)
        for scale in (1, -1)
    ]
    batch = batch_of((range(64), 0, range(4)))
    expected = [run(program, batch) for program in programs]
    right = [0, 0]

    def work(index: int) -> None:
        for _ in range(5):
            right[index] += run(programs[index], batch).tobytes() == expected[index].tobytes()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [5, 5]


def test_many_small_jobs_end() -> None:
    """Every job of a pool with more threads than CPUs is finished before the next begins."""
    weight = {"w": view_of(np.eye(320, dtype=np.float32))}
    x = np.random.default_rng(1).standard_normal((4, 320)).astype(np.float32)

    def body(ops: Any, x: Any, w: Any) -> Any:
        for _ in range(40):
            x = ops.linear(x, (w["w"],))
        return x

    for threads in (2, 7):
        assert (apply(NativeBackend(threads), body, x, weight) == x).all()


def test_idle_threads_sleep() -> None:
    """A pool at rest leaves its futile spinning within microseconds."""
    backend = NativeBackend(threads=4)
    apply(backend, lambda ops, x, w: x, ROWS)
    pause = threading.Event()
    pause.wait(0.02)
    before = resource.getrusage(resource.RUSAGE_SELF)
    pause.wait(0.1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


SMALL_SIGNAL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from headrace.ops.native import _native
print("amx" in _native.usable_isas(), _native.amx_refusal())
"""


@pytest.mark.skipif("amx" not in _native.usable_isas(), reason="needs AMX")
def test_a_small_signal_stack_keeps_amx_away_and_is_told() -> None:
    assert _native.amx_refusal() == ""
    command = [sys.executable, "-c", SMALL_SIGNAL_STACK]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "False a thread's signal stack has no room for the registers of AMX\n"
