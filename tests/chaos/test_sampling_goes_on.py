"""A worker dies at a chosen step, and each way to choose tokens and to end goes on elsewhere as if
nothing had happened, to the last bit of each token's probability.

All that a choice depends on besides the model has to go along: the counter of the generator, what
the penalties count, how many tokens there have to be, and what may become a stop string.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.test_load import with_params
from chaos.test_workers import WAIT_S, requests, tiny_config
from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config
from headrace.live.boot import boot
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import GenerateRequest, TextEngine
from support.remote_worker import listening, remote_worker

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

MIN_TOKENS, MAX_TOKENS = 90, 160  # the last moment is earlier than the first
MOMENTS = [2, 5, 30, 60]  # steps, of which each gives every sequence a token
# It dies before a step; they are counted from the one by which all requests have come.
DIES_AT_A_STEP = """
import os, signal, time
from headrace.cluster.session import Session
from headrace.live.device import Device
submit, start, left, num_come = Session.submit, Device._start_step, [AT], [0]
def count(self, seqs, sent_ns):
    num_come[0] += len(seqs)
    submit(self, seqs, sent_ns)
def start_step(self, plan):
    left[0] -= num_come[0] >= NUM
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)  # other threads may run on for a moment
    start(self, plan)
Session.submit, Device._start_step = count, start_step
"""


@pytest.fixture
def config(tmp_path: Path, port: int) -> Config:
    config = tiny_config(tmp_path)
    return replace(
        config,
        cluster=listening(tmp_path, port, canary=False),
        # Between two workers there is none.
        router=replace(config.router, worker_wait_s=60.0),
    )


def plain() -> GenerateRequest:
    (one,) = requests(1)
    return with_params(one, temperature=0.9, frequency_penalty=0.0, max_tokens=MAX_TOKENS)


def each_way(deltas: list[ChoiceDelta]) -> dict[str, GenerateRequest]:
    """Requests that differ from the plain one, which had these deltas, in one thing each."""
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    begun = len("".join(delta.text for delta in deltas[:3]))
    # A stop string of one character that comes early, and late again.
    first_third, rest = text[begun : len(text) // 3], text[len(text) * 2 // 3 :]
    usual = next(char for char, _ in Counter(rest).most_common() if char in first_third)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "greedy": {"temperature": 0.0},
        "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        "another seed": {"seed": 2**64 - 1},
        "repetition penalty": {"repetition_penalty": 1.3},
        "frequency penalty": {"frequency_penalty": 0.7},
        "presence penalty": {"presence_penalty": 0.9},
        "logit bias": {"logit_bias": ((tokens[0], -100.0), (tokens[1], 3.0))},
        "no logprobs": {"logprobs": None},
        "logprobs of the prompt": {"logprobs": 5, "prompt_logprobs": 2},
        "min tokens before a stop token": {
            "stop_token_ids": tuple(set(tokens[3:9])),
            "min_tokens": MIN_TOKENS,
        },
        "all of it": {
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.2,
            "presence_penalty": -0.3,
            "logit_bias": ((tokens[2], 2.0),),
            "stop_token_ids": tuple(set(tokens[3:9])),
            "min_tokens": MIN_TOKENS,
            "top_k": 30,
        },
    }
    asked = {way: with_params(plain(), **params) for way, params in ways.items()}
    # It begins before each moment but the first, and ends after the last one.
    long = text[begun : len("".join(delta.text for delta in deltas[:MIN_TOKENS]))]
    asked["stop string"] = replace(plain(), stop=(long,))
    asked["min tokens before a stop string"] = replace(
        with_params(plain(), min_tokens=MIN_TOKENS), stop=(usual,)
    )
    return asked


Outcome = tuple[object, ...]


def outcomes(engine: TextEngine, asked: list[GenerateRequest]) -> list[Outcome]:
    deltas: list[list[ChoiceDelta]] = [[] for _ in asked]
    for index, delta in engine.stream_all(asked, max_open=len(asked)):
        deltas[index].append(delta)
    return [outcome(one) for one in deltas]


def outcome(deltas: list[ChoiceDelta]) -> Outcome:
    finish = deltas[-1].finish
    assert finish is not None
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs],
        [logprob for delta in deltas for logprob in delta.prompt_logprobs],
        (finish.reason, finish.stop_reason, finish.num_output_tokens, finish.error),
    )


@pytest.fixture
def undisturbed(config: Config) -> tuple[dict[str, GenerateRequest], list[Outcome]]:
    booted = boot(replace(config, cluster=ClusterConfig()))
    try:
        asked = each_way(list(booted.text_engine.stream_sync(plain())))
        wanted = outcomes(booted.text_engine, list(asked.values()))
    finally:
        booted.close()
    # What changes nothing would not be missed.
    assert all(one not in wanted[:index] for index, one in enumerate(wanted))
    return asked, wanted


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_way_to_sample_and_to_end_goes_on(
    config: Config,
    undisturbed: tuple[dict[str, GenerateRequest], list[Outcome]],
    port: int,
    stack: ExitStack,
    moment: int,
) -> None:
    ways, wanted = undisturbed
    asked = list(ways.values())
    pool = stack.enter_context(ThreadPoolExecutor(1))
    fate = DIES_AT_A_STEP.replace("AT]", f"{moment}]").replace("NUM", str(len(asked)))
    first = stack.enter_context(remote_worker(port, name="first", before=fate))
    cluster = boot_cluster(config)
    stack.callback(cluster.close)
    reader = pool.submit(outcomes, cluster.text_engine, asked)
    first.wait(WAIT_S)
    stack.enter_context(remote_worker(port, name="second"))
    got = reader.result(WAIT_S)
    assert dict(zip(ways, got, strict=True)) == dict(zip(ways, wanted, strict=True))
    assert cluster.engine.stats().num_migrations == len(asked)
    cluster.engine.check()
