"""The ledger's arithmetic, and that a plan fits or says what would."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.errors import ConfigError
from headrace.core.config.ledger import AUTO_KV_SHARE, ByteLedger, KvPlan, blocks_for, plan_kv
from headrace.core.config.settings import SETTINGS
from headrace.core.config.units import format_bytes, size_text

MIB = 1 << 20
BLOCK_BYTES = 368_640  # of a model of 30 layers, 3 KV heads of 64
LEDGER = ByteLedger(weights=100 * MIB, activations=40 * MIB, other=10 * MIB, available=1000 * MIB)


def plan(
    ledger: ByteLedger = LEDGER,
    *,
    asked_bytes: int = 0,
    max_model_len: int = 2048,
    max_running_seqs: int = 256,
    block_bytes: int = BLOCK_BYTES,
    step_tokens: int = 512,
) -> KvPlan:
    return plan_kv(
        ledger,
        asked_bytes=asked_bytes,
        block_bytes=block_bytes,
        block_size=16,
        max_model_len=max_model_len,
        max_running_seqs=max_running_seqs,
        step_tokens=step_tokens,
    )


def test_the_ledger_adds_up() -> None:
    ledger = ByteLedger(weights=1, activations=2, kv=4, staging=8, other=16, available=31)
    assert (ledger.total, ledger.free, ledger.fits) == (31, 0, True)
    smaller = ByteLedger(weights=1, activations=2, kv=4, staging=8, other=16, available=30)
    assert (smaller.free, smaller.fits) == (-1, False)


def test_auto_takes_a_share_of_what_is_available() -> None:
    kv = plan()
    assert kv.memory_bytes <= 250 * MIB < kv.memory_bytes + BLOCK_BYTES
    assert kv.ledger.kv == kv.memory_bytes
    assert kv.reason == "25% of 1000 MiB available"


def test_auto_takes_no_more_than_sequences_can_use() -> None:
    kv = plan(max_model_len=100, max_running_seqs=3)
    assert kv.num_blocks == 3 * 7
    assert kv.num_full_seqs == 3
    assert kv.reason == "all that 3 sequences of 100 tokens use"


def test_auto_holds_one_whole_sequence_even_beyond_the_share() -> None:
    kv = plan(max_model_len=16_384)
    assert kv.num_blocks == 1024
    assert kv.memory_bytes > AUTO_KV_SHARE * LEDGER.available
    assert kv.reason == "one sequence of 16384 tokens"


def test_auto_never_takes_what_is_not_free() -> None:
    ledger = ByteLedger(weights=900 * MIB, available=1000 * MIB)
    kv = plan(ledger)
    assert kv.num_blocks == 100 * MIB // BLOCK_BYTES
    assert kv.ledger.fits


def test_a_pool_as_asked_is_cut_to_whole_blocks() -> None:
    kv = plan(asked_bytes=200 * BLOCK_BYTES + 5)
    assert (kv.num_blocks, kv.num_tokens, kv.reason) == (200, 3200, "as asked")
    assert kv.num_seqs_of(512) == 200 // 32
    assert kv.num_full_seqs == 1


def test_when_no_sequence_fits_the_longest_that_does_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(max_model_len=100_000)
    length = int(re.fullmatch(r"--max-model-len (\d+) fits", caught.value.hint)[1])  # type: ignore[index]
    assert plan(max_model_len=length).num_full_seqs >= 1
    with pytest.raises(ConfigError):
        plan(max_model_len=length + 1)


def test_when_the_pool_is_too_small_the_least_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(asked_bytes=10 * BLOCK_BYTES)
    assert "holds 160 tokens" in caught.value.message
    match = re.fullmatch(
        r"--kv-memory (\S+) is enough, or --max-model-len (\d+)", caught.value.hint
    )
    assert match is not None
    least, length = memory(match[1]), int(match[2])
    assert plan(asked_bytes=least).num_full_seqs == 1
    with pytest.raises(ConfigError):
        plan(asked_bytes=int(least * 0.985))
    assert plan(asked_bytes=10 * BLOCK_BYTES, max_model_len=length).num_full_seqs == 1


def test_when_the_pool_is_too_large_the_most_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(asked_bytes=900 * MIB)
    assert caught.value.hint == "--kv-memory 842MiB fits"  # of 850 MiB
    assert plan(asked_bytes=842 * MIB).ledger.fits


def test_what_is_told_of_a_pool_that_is_too_large_fits_exactly() -> None:
    """There is room for a little more than half a sequence."""
    ledger = ByteLedger(weights=1000 * MIB - 70 * BLOCK_BYTES - 100, available=1000 * MIB)
    with pytest.raises(ConfigError) as caught:
        plan(ledger, asked_bytes=900 * MIB)
    match = re.fullmatch(r"--kv-memory (\S+) fits with --max-model-len (\d+)", caught.value.hint)
    assert match is not None
    assert (match[1], match[2]) == ("24.7MiB", "1120")
    kv = plan(ledger, asked_bytes=memory(match[1]), max_model_len=1120)
    assert (kv.num_blocks, kv.num_full_seqs) == (70, 1)


def memory(text: str) -> int:
    """What the flag makes of it."""
    value = SETTINGS["kv.memory_bytes"].parse(text)
    assert isinstance(value, int)
    return value


def test_when_the_model_alone_is_too_large_nothing_helps_but_memory() -> None:
    ledger = ByteLedger(weights=2000 * MIB, available=1000 * MIB)
    with pytest.raises(ConfigError) as caught:
        plan(ledger)
    need = 128 * BLOCK_BYTES + 1000 * MIB
    assert caught.value.hint == f"free {format_bytes(need)}, or serve a smaller model"
    with pytest.raises(ConfigError) as caught:
        plan(ledger, asked_bytes=128 * BLOCK_BYTES)
    assert caught.value.hint == "serve a smaller model, or free some memory"


@pytest.mark.parametrize("asked_bytes", [0, 128 * BLOCK_BYTES])
def test_where_a_step_takes_the_room_the_hint_is_a_smaller_one(asked_bytes: int) -> None:
    ledger = ByteLedger(weights=100 * MIB, activations=100_000 * MIB // 4, available=1000 * MIB)
    with pytest.raises(ConfigError) as caught:
        plan(ledger, asked_bytes=asked_bytes, step_tokens=100_000)
    found = re.fullmatch(r"--step-tokens (\d+) fits", caught.value.hint)
    assert found is not None
    fitting = int(found[1])
    for more, fits in ((0, True), (1, False)):
        smaller = replace(ledger, activations=(fitting + more) * MIB // 4)
        assert (smaller.free >= 128 * BLOCK_BYTES) == fits
    plan(replace(ledger, activations=fitting * MIB // 4), asked_bytes=asked_bytes)


@given(
    weights=st.integers(0, 1 << 32),
    available=st.integers(0, 1 << 34),
    asked=st.one_of(st.just(0), st.integers(1, 1 << 34)),
    block_bytes=st.integers(1, 1 << 22),
    max_model_len=st.integers(1, 1 << 17),
    max_running_seqs=st.integers(1, 1024),
)
def test_a_plan_fits_and_holds_a_whole_sequence(
    weights: int,
    available: int,
    asked: int,
    block_bytes: int,
    max_model_len: int,
    max_running_seqs: int,
) -> None:
    ledger = ByteLedger(weights=weights, available=available)
    least_bytes = blocks_for(max_model_len, 16) * block_bytes
    room_bytes = max(0, available - weights) // block_bytes * block_bytes
    is_possible = least_bytes <= room_bytes and (
        not asked or least_bytes <= asked // block_bytes * block_bytes <= room_bytes
    )

    def planned() -> KvPlan:
        return plan(
            ledger,
            asked_bytes=asked,
            block_bytes=block_bytes,
            max_model_len=max_model_len,
            max_running_seqs=max_running_seqs,
        )

    if not is_possible:
        with pytest.raises(ConfigError) as caught:
            planned()
        assert caught.value.hint
        return
    kv = planned()
    assert kv.ledger.fits
    assert kv.num_full_seqs >= 1
    if asked:
        assert kv.memory_bytes <= asked < kv.memory_bytes + block_bytes
    else:
        assert kv.num_blocks <= max_running_seqs * blocks_for(max_model_len, 16)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (98_362_432, "93.8 MiB"),
        (1 << 30, "1.00 GiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (10 << 20, "10.0 MiB"),
        (100 << 20, "100 MiB"),
        (-5 << 20, "-5.00 MiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, None, "0"),
        (1000, None, "1kB"),
        (10**9, None, "1GB"),
        (2_500_000_000, None, "2.5GB"),
        (1024, None, "1KiB"),
        (1025, None, "1025"),
        (1536 << 20, None, "1.5GiB"),
        (1 << 50, None, "1024TiB"),
        (262_080 << 10, None, "262080KiB"),
        (1_234_567_890, None, "1234567890"),
        (1_234_567_890, 1_300_000_000, "1.2GiB"),
        (999_000_000, 1_000_000_000, "953MiB"),
        (1 << 30, 2 << 30, "1GiB"),
    ],
)
def test_sizes_as_settings_take_them(low: int, high: int | None, text: str) -> None:
    assert size_text(low, high) == text
    assert low <= memory(text) <= (low if high is None else high)


@given(low=st.integers(0, 1 << 49), more=st.integers(0, 1 << 40))
def test_a_setting_takes_a_size_within_its_bounds(low: int, more: int) -> None:
    assert low <= memory(size_text(low, low + more)) <= low + more
    assert memory(size_text(low)) == low
