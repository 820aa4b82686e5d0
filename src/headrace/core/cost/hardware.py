"""What a model's steps cost before anything was measured: its shape, and a device's data sheet.

Pure arithmetic on published figures; refuses to know how near an engine comes to them.
"""

from typing import Final

import msgspec

# Bytes of one element. Four-bit formats carry an 8-bit scale for each 16 (fp4) or 32 (int4) values.
BYTES_BY_DTYPE: Final = {
    "f32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "int4": 0.53125,
}
ACTIVATION_BYTES: Final = 2  # of one element between layers, as it crosses a link


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a model lies on devices.

    Every replica of attention has `tp` ranks in each of `pp` stages; there are `dp` replicas.
    Routed experts are sliced like everything else (`ep` = 1), or lie whole on the `ep` = tp · dp
    ranks of a stage, which then exchange tokens.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "EP": self.ep, "DP": self.dp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer that its steps cost depend on.

    `num_params` counts everything that is stored: what every token passes through, the embedding
    table (looked up, hence never multiplied), the logits' matrix and all routed experts.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int = 0  # of queries, which TP must divide; 0 = anything does
    num_params: float
    embed_params: float = 0.0  # 0 where the logits' matrix is the same (tied)
    logit_params: float = 0.0
    expert_params: float = 0.0  # of one routed expert, in all layers together
    num_experts: int = 0
    experts_per_token: int = 0
    num_moe_layers: int = 0
    kv_elems_per_token: float  # in all layers
    kv_ways: int = 1  # ranks that KV can be divided over: KV heads; 1 for a latent (MLA)
    window_tokens: int = 0  # reach of layers with a sliding window
    window_share: float = 0.0  # of all layers
    attention_flop_per_pair: float = 0.0  # scores and values of one (query, key) pair, all layers
    # The same where a latent is attended to without expanding it, as MLA decodes; 0 = no latent.
    latent_flop_per_pair: float = 0.0
    source: str = ""

    @property
    def shared_params(self) -> float:
        """What every token passes through in every layer."""
        routed = self.num_experts * self.expert_params
        return self.num_params - self.embed_params - self.logit_params - routed

    @property
    def active_params(self) -> float:
        """What one token passes through, embedding table included as publishers mostly count."""
        idle = self.num_experts - self.experts_per_token
        return self.num_params - idle * self.expert_params

    def layout_fault(self, layout: Layout) -> str:
        """Why the model cannot be laid out so; "" = it can."""
        if self.num_heads % layout.tp:
            return f"TP {layout.tp} does not divide {self.num_heads} heads"
        if self.num_heads and self.kv_ways % layout.tp and layout.tp % self.kv_ways:
            heads = f"{self.kv_ways} KV heads"
            return f"TP {layout.tp} neither divides {heads} nor is a multiple of them"
        if layout.pp > self.num_layers:
            return f"PP {layout.pp} is more than {self.num_layers} layers"
        if layout.ep not in (1, layout.tp * layout.dp):
            return f"EP {layout.ep} is neither 1 nor TP · DP = {layout.tp * layout.dp}"
        if layout.ep > 1 and not self.num_experts:
            return f"EP {layout.ep} shares experts, and it has none"
        if layout.ep > 1 and self.num_experts % layout.ep:
            return f"EP {layout.ep} does not divide {self.num_experts} experts"
        return ""

    def kv_elems_read(self, num_kv_tokens: float, num_seqs: float) -> float:
        """Elements that attention reads for sequences of `num_kv_tokens` together.

        Windows are applied to the mean length.
        """
        share = self.window_share
        if not share:
            return self.kv_elems_per_token * num_kv_tokens
        within = min(num_kv_tokens, self.window_tokens * num_seqs)
        return self.kv_elems_per_token * ((1.0 - share) * num_kv_tokens + share * within)

    def kv_elems_held(self, num_tokens: float) -> float:
        """Elements that one sequence of `num_tokens` occupies."""
        return self.kv_elems_read(num_tokens, 1)

    def attention_flop(
        self, num_pairs: float, num_tokens: float, *, is_decode: bool = False
    ) -> float:
        """FLOP of attention over `num_pairs` by `num_tokens` query tokens."""
        pairs = num_pairs
        if self.window_share:
            within = min(num_pairs, self.window_tokens * num_tokens)
            pairs = (1.0 - self.window_share) * num_pairs + self.window_share * within
        absorbed = self.latent_flop_per_pair if is_decode else 0.0
        return pairs * (absorbed or self.attention_flop_per_pair)

    def experts_read(self, num_tokens: float) -> float:
        """Routed experts that at least one of the tokens chooses, if all are equally likely:
        E · (1 - (1 - k/E)^tokens).
        """
        if not self.num_experts:
            return 0.0
        idle: float = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - idle)


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device by its data sheet: dense rates (no sparsity), links in one direction."""

    name: str
    flop_per_s_by_dtype: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    scaleup_bytes_per_s: float = 0.0  # to the others of its domain (NVLink and its like)
    scaleup_gpus: int = 8  # devices of one such domain
    scaleout_bytes_per_s: float = 0.0  # to devices beyond it
    tdp_w: float | None = None
    price_usd_per_hour: float | None = None
    source: str = ""

    def flop_per_s(self, weight_dtype: str) -> float:
        """The rate of the multiplications: that of the weights' type where the device multiplies in
        it, and else that of the next wider one it has.
        """
        widening = {"int4": (), "fp4": ("fp4", "fp8"), "fp8": ("fp8",), "int8": ("int8", "fp8")}
        for dtype in widening.get(weight_dtype, ()):
            if rate := self.flop_per_s_by_dtype.get(dtype):
                return rate
        return self.flop_per_s_by_dtype["bf16"]

    def ridge_flop_per_byte(self, weight_dtype: str) -> float:
        """The intensity at which arithmetic and memory take the same time (Williams et al. 2009,
        "Roofline").
        """
        return self.flop_per_s(weight_dtype) / self.memory_bytes_per_s

    def link_bytes_per_s(self, num_gpus: int) -> float:
        """The slowest link among `num_gpus` that work together."""
        is_within = num_gpus <= self.scaleup_gpus
        return self.scaleup_bytes_per_s if is_within else self.scaleout_bytes_per_s


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """How near an engine comes to the data sheet. Shares are of the data sheet's rates."""

    memory_share: float = 1.0
    flop_share: float = 1.0
    link_share: float = 1.0
    layer_ns: float = 0.0  # of each layer: launches, and what no roofline counts
    step_ns: float = 0.0
    seq_ns: float = 0.0  # of each sequence in a step: sampling, tables
    collective_ns: float = 0.0  # until the first byte of a collective moves
    # Of a device, without weights and KV; 0 = what most engines keep, by the device's size.
    reserved_bytes: float = 0.0
    source: str = "data sheet at 100 %: a bound, not an estimate"


IDEAL: Final = Efficiency()
