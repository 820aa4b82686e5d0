"""The default model computes what `transformers` computes.

`data/reference.json` holds its results in float32; ours keep keys and values in bf16. What that
alone does was measured with `transformers`, rounding what its cache takes in: over the 2176 steps
of all prompts the log probabilities of the four likeliest tokens moved by 0.0084 in the mean, 0.053
in 99 of 100 cases and 0.23 at most, the distance between the first two by 0.26 at most, and seven
prompts came to a step where the first two changed places. The bounds of exact activations are these
figures with little to spare.

Activations in int8, the default without AMX, move more: 0.089 in the mean, 0.44 in 99 of 100 cases
and 0.94 at most; the likeliest two that change places are 0.29 apart at most. Of four tokens within
0.01 of each other, the last comes out first once. The perplexity of these few tokens is 0.50 %
above the reference's. Attention in bf16 alone moves them by 0.011, 0.066 and 0.29, and with int12,
the default with AMX, by 0.054, 0.25 and 0.43; the perplexity is within 0.1 %. The bounds are these
figures, again with little to spare; the bits are the same on every machine.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.plan import TokenLogprob
from headrace.models.gguf import GgufFile
from headrace.models.hub import DEFAULT_MODEL, ensure_default_model
from headrace.models.load import LoadedModel, load_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_gguf
from headrace.ops.interface import Backend, Program
from support.greedy import BLOCK_SIZE, compile_model, forced, greedy, log_likelihoods

DATA = Path(__file__).parent / "data"
REFERENCE: dict[str, Any] = json.loads((DATA / "reference.json").read_text())
PROMPTS: list[dict[str, Any]] = REFERENCE["prompts"]
NUM_TOKENS = 64


@dataclass(frozen=True)
class Bounds:
    """Of differences in log probability, which are differences of logits."""

    gap: float  # likeliest tokens of the reference that are closer may change places
    max: float
    p99: float
    mean: float
    num_candidates: int  # tokens of the reference that may come out first
    num_common: int  # of the four likeliest
    share_compared: float  # steps up to each prompt's first other token
    perplexity: float  # relative


EXACT = Bounds(
    0.05, 0.2, 0.07, 0.012, num_candidates=2, num_common=3, share_compared=0.85, perplexity=0.005
)
INT8 = Bounds(
    0.55, 1.1, 0.45, 0.09, num_candidates=4, num_common=2, share_compared=0.4, perplexity=0.011
)

ATTENTION = Bounds(
    0.05, 0.35, 0.08, 0.013, num_candidates=2, num_common=3, share_compared=0.8, perplexity=0.005
)
INT12 = Bounds(
    0.2, 0.6, 0.28, 0.06, num_candidates=4, num_common=3, share_compared=0.5, perplexity=0.005
)


def make_backend(name: str) -> Backend[Any, Any]:
    if name == "torch":
        from headrace.ops.torch.backend import TorchBackend

        return TorchBackend()
    from headrace.ops.native.backend import NativeBackend

    _, activations, attention = name.split("-")
    return NativeBackend(activations=activations, attention=attention)


@pytest.fixture(
    scope="module",
    params=[
        "native-f32-f32",
        "native-f32-bf16",
        "native-int8-f32",
        "native-int12-bf16",
        pytest.param("torch", marks=pytest.mark.slow),
    ],
)
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bounds(backend_name: str) -> Bounds:
    return {
        "native-int8-f32": INT8,
        "native-int12-bf16": INT12,
        "native-f32-bf16": ATTENTION,
    }.get(backend_name, EXACT)


@pytest.fixture(scope="module")
def running(backend_name: str) -> tuple[LoadedModel, Program]:
    backend = make_backend(backend_name)
    loaded = load_model(ensure_default_model(), backend)
    lengths = [len(prompt["ids"]) for prompt in PROMPTS]
    num_blocks = sum(-(-(length + NUM_TOKENS) // BLOCK_SIZE) for length in lengths)
    program = compile_model(
        backend, loaded.model, num_blocks=num_blocks, max_tokens=max(512, sum(lengths))
    )
    return loaded, program


@pytest.fixture(scope="module")
def answers(backend_name: str, running: tuple[LoadedModel, Program]) -> list[list[TokenLogprob]]:
    """The likeliest four tokens at every step of every prompt.

    Our batch runs as it would be served. The readable backend is too slow for that and computes the
    reference's own tokens in one step, which finds the same up to the first difference.
    """
    program = running[1]
    if backend_name.startswith("native"):
        results = greedy(program, [prompt["ids"] for prompt in PROMPTS], NUM_TOKENS, num_top=4)
    else:
        results = [
            forced(program, prompt["ids"], [step["ids"][0] for step in prompt["steps"]], num_top=4)
            for prompt in PROMPTS
        ]
    answers = [[result.logprob for result in row if result.logprob is not None] for row in results]
    assert all(len(row) == NUM_TOKENS for row in answers)
    return answers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = ensure_default_model()
    return tokenizer_from_gguf(path, GgufFile(path).metadata)


def test_the_reference_is_of_this_model() -> None:
    assert REFERENCE["model_sha256"] == DEFAULT_MODEL.sha256
    assert len(PROMPTS) >= 30
    assert all(len(prompt["steps"]) == NUM_TOKENS for prompt in PROMPTS)


@pytest.mark.timeout(1200)
def test_greedy_tokens_equal_the_reference(
    answers: list[list[TokenLogprob]], bounds: Bounds
) -> None:
    """Token by token, up to the first tie of the reference that falls the other way."""
    num_compared = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for step, found in zip(prompt["steps"], answer, strict=True):
            num_compared += 1
            if found.top[0][0] != step["ids"][0]:
                assert found.top[0][0] in step["ids"][: bounds.num_candidates], prompt["text"]
                rank = step["ids"].index(found.top[0][0])
                gap = step["logprobs"][0] - step["logprobs"][rank]
                assert gap < bounds.gap, (prompt["text"], gap)
                break
    assert num_compared > bounds.share_compared * len(PROMPTS) * NUM_TOKENS


@pytest.mark.timeout(1200)
def test_log_probabilities_agree(answers: list[list[TokenLogprob]], bounds: Bounds) -> None:
    """As long as both have taken the same tokens, for each of the reference's likeliest four."""
    differences: list[float] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for step, found in zip(prompt["steps"], answer, strict=True):
            ours = dict(found.top)
            theirs = dict(zip(step["ids"], step["logprobs"], strict=True))
            # The fourth of theirs may be the fifth of ours.
            assert len(ours.keys() & theirs.keys()) >= bounds.num_common
            differences += [abs(ours[id_] - theirs[id_]) for id_ in ours.keys() & theirs.keys()]
            if found.top[0][0] != step["ids"][0]:
                break
    differences.sort()
    assert differences[-1] < bounds.max
    assert differences[len(differences) * 99 // 100] < bounds.p99
    assert sum(differences) / len(differences) < bounds.mean


@pytest.mark.timeout(1200)
def test_perplexity_equals_the_reference(
    running: tuple[LoadedModel, Program], bounds: Bounds
) -> None:
    loaded, program = running
    tokens = loaded.tokenizer.encode((DATA / "alice.txt").read_text(), add_special=False)
    assert len(tokens) == REFERENCE["alice"]["num_tokens"]
    found = log_likelihoods(program, tokens, chunk_tokens=200)
    assert len(found) == len(tokens) - 1
    ours, theirs = -sum(found) / len(found), REFERENCE["alice"]["nll_per_token"]
    assert math.exp(ours) == pytest.approx(math.exp(theirs), rel=bounds.perplexity)


@pytest.mark.parametrize("case", REFERENCE["texts"] + PROMPTS, ids=lambda case: case["text"][:20])
def test_tokens_equal_the_reference(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


def test_digits_of_every_script_stand_alone(tokenizer: Tokenizer) -> None:
    """The file asks for it; `transformers` does not do it when it reads GGUF files."""
    for text in (" 12", " ½", "x٣"):
        apart = [id_ for char in text for id_ in tokenizer.encode(char, add_special=False)]
        assert tokenizer.encode(text, add_special=False) == apart


def test_chats_render_as_the_reference() -> None:
    from support.model_files import RecordingBackend

    template = load_model(ensure_default_model(), RecordingBackend()).chat_template
    assert template is not None
    for chat in REFERENCE["chats"]:
        assert template.render(chat["messages"]) == chat["text"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
def test_the_recorded_reference_is_what_transformers_computes() -> None:
    from golden.make_reference import greedy_steps, load_reference
    from golden.reference_prompts import CHATS, PROMPTS, TEXTS

    model, theirs = load_reference(ensure_default_model())
    assert [case["text"] for case in REFERENCE["texts"]] == TEXTS
    assert [chat["messages"] for chat in REFERENCE["chats"]] == CHATS
    recorded = REFERENCE["prompts"]
    assert [prompt["text"] for prompt in recorded[: len(PROMPTS)]] == PROMPTS
    for case in REFERENCE["texts"]:
        assert theirs(case["text"], add_special_tokens=False).input_ids == case["ids"]
    for chat in REFERENCE["chats"]:
        text = theirs.apply_chat_template(
            chat["messages"], tokenize=False, add_generation_prompt=True
        )
        assert text == chat["text"]
    again = greedy_steps(model, [prompt["ids"] for prompt in recorded], 8)
    for prompt, steps in zip(recorded, again, strict=True):
        for step, old in zip(steps, prompt["steps"], strict=False):
            assert step["logprobs"] == pytest.approx(old["logprobs"], abs=1e-3)
