"""Frequencies of rotary position embeddings, scaling for long contexts included."""

import math

from headrace.models.facts import Facts


def frequencies(head_dim: int, base: float) -> tuple[float, ...]:
    """Pair i turns by base^(-2i / head_dim) a position (RoFormer, Su et al. 2021): head_dim / 2
    values.
    """
    return tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2))


def linear_scaled(inv_freq: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """Position interpolation (Chen et al. 2023): positions are stretched by `factor`."""
    return tuple(f / factor for f in inv_freq)


def llama3_scaled(
    inv_freq: tuple[float, ...],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: float,
) -> tuple[float, ...]:
    """Llama 3.1's rule: long waves are stretched by `factor`, short ones kept, those between
    blended linearly.
    """

    def scaled(f: float) -> float:
        turns = (
            original_context * f / (2 * math.pi)
        )  # in the context the model was first trained on
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return kept * f + (1 - kept) * f / factor

    return tuple(scaled(f) for f in inv_freq)


def from_config(config: Facts, head_dim: int) -> tuple[float, ...]:
    """What a config.json states, in `rope_parameters` or in `rope_theta` and `rope_scaling`."""
    rope = config.table("rope_parameters") or config.table("rope_scaling") or Facts(config.path, {})
    base = (rope if "rope_theta" in rope else config).number("rope_theta", 10_000.0, low=1.0)
    for part in (rope, config):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise config.refuse("rotary embeddings over a part of each head are not supported")
    inv_freq = frequencies(head_dim, base)
    match rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return inv_freq
        case "linear":
            return linear_scaled(inv_freq, rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise config.refuse(
                    f"low_freq_factor {low:g} is not below high_freq_factor {high:g}"
                )
            return llama3_scaled(
                inv_freq,
                factor=rope.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_context=rope.number("original_max_position_embeddings"),
            )
        case other:
            raise config.refuse(
                f"rope scaling {other!r} is not supported; supported are default, linear and llama3"
            )


def from_gguf(metadata: Facts, architecture: str, head_dim: int) -> tuple[float, ...]:
    """What GGUF metadata state; a file's own `rope_freqs` tensor comes on top (see `divided`)."""
    base = metadata.number(f"{architecture}.rope.freq_base", 10_000.0, low=1.0)
    if metadata.integer(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise metadata.refuse("rotary embeddings over a part of each head are not supported")
    inv_freq = frequencies(head_dim, base)
    match metadata.text(f"{architecture}.rope.scaling.type", "none"):
        case "none":
            return inv_freq
        case "linear":
            return linear_scaled(inv_freq, metadata.number(f"{architecture}.rope.scaling.factor"))
        case other:
            raise metadata.refuse(
                f"rope scaling {other!r} is not supported; supported are none and linear"
            )


def divided(inv_freq: tuple[float, ...], factors: tuple[float, ...]) -> tuple[float, ...]:
    """GGUF files of Llama 3.1 and later carry their scaling as one factor for each pair."""
    return tuple(f / factor for f, factor in zip(inv_freq, factors, strict=True))
