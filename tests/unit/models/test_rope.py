"""Frequencies of rotary embeddings, against `transformers`' own and against the definition."""

from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models import rope
from headrace.models.facts import Facts

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_config(**values: Any) -> tuple[float, ...]:
    return rope.from_config(Facts(Path("config.json"), values), 64)


def from_gguf(**values: Any) -> tuple[float, ...]:
    metadata = {f"llama.rope.{key.replace('__', '.')}": value for key, value in values.items()}
    return rope.from_gguf(Facts(Path("m.gguf"), metadata), "llama", 64)


def test_frequencies_fall_from_one_by_a_constant_ratio() -> None:
    assert rope.frequencies(4, 10_000.0) == pytest.approx((1.0, 0.01))
    assert len(rope.frequencies(64, 500_000.0)) == 32


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Values of an independent implementation (`transformers` 5.24)."""
    found = from_config(rope_parameters=LLAMA3 | {"rope_theta": 500_000.0})
    pairs = [0, 1, 10, 14, 15, 16, 17, 18, 24, 31]
    assert [found[i] for i in pairs] == pytest.approx(
        [
            *(1.0, 0.6636013, 0.01656044, 0.003211446, 0.001371894),
            *(0.000524846, 0.0001785078, 7.784655e-05, 6.64787e-06, 3.767323e-07),
        ],
        rel=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        LLAMA3 | {"rope_theta": 500_000.0},
    ],
)
def test_agrees_with_transformers(parameters: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq.tolist()
    assert from_config(rope_parameters=parameters) == pytest.approx(theirs, rel=1e-5)


def test_older_spellings_mean_the_same() -> None:
    theta = 500_000.0
    new = from_config(rope_parameters=LLAMA3 | {"rope_theta": theta})
    assert from_config(rope_theta=theta, rope_scaling=LLAMA3) == new
    linear = from_config(rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert from_config(rope_scaling={"type": "linear", "factor": 2.0}) == linear
    assert from_config(rope_scaling=None) == rope.frequencies(64, 10_000.0)


def test_gguf_states_base_and_linear_scaling() -> None:
    assert from_gguf(freq_base=100_000.0) == rope.frequencies(64, 100_000.0)
    scaled = from_gguf(scaling__type="linear", scaling__factor=4.0)
    assert scaled == rope.linear_scaled(rope.frequencies(64, 10_000.0), 4.0)


def test_factors_of_a_file_divide() -> None:
    assert rope.divided((1.0, 0.5), (1.0, 8.0)) == (1.0, 0.0625)


def test_refuses_what_it_does_not_compute() -> None:
    with pytest.raises(ConfigError, match="'yarn' is not supported"):
        from_config(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ConfigError, match="'yarn' is not supported"):
        from_gguf(scaling__type="yarn")
    with pytest.raises(ConfigError, match="part of each head"):
        from_config(partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match="part of each head"):
        from_gguf(dimension_count=32)
    with pytest.raises(ConfigError, match="is not below"):
        from_config(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0})
    with pytest.raises(ConfigError, match="factor is 0"):
        from_config(rope_scaling={"type": "linear", "factor": 0})
