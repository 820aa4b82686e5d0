"""How the next token of a sequence is chosen. Checked at the edge; the core trusts the values."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one sequence, OpenAI names where OpenAI has them.

    The generator is counter-based: its key is (seed, choice), its counter the position of the
    token, so a draw depends on nothing but these three.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    seed: int = 0  # unsigned 64-bit
    choice: int = 0  # index among the n choices of a request
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives reported beside the chosen token
    prompt_logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
