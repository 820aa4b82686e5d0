"""Whatever dies, and whenever: no request is lost, and no token differs."""

from functools import cache
from random import Random

import msgspec
import pytest

from headrace.core.base.events import Finish, Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId
from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerDrain
from support.cluster_parts import Front, Worker
from support.cluster_world import ClusterWorld
from support.fake_device import VOCAB, expected_output
from support.seeds import FEW_AND_A_THOUSAND

NUM_REQUESTS = 12


@cache
def requests(seed: int) -> tuple[tuple[SeqSpec, ...], ...]:
    """Prompts that share beginnings, some with several choices, some with scores."""
    rng = Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(100)]
    made, next_seq_id = [], 0
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        prompt = tuple(stem[: rng.randrange(100)] + own)
        max_tokens = rng.randrange(1, 60)
        seqs = []
        for choice in range(rng.choice((1, 1, 1, 3))):
            params = SamplingParams(
                seed=index,
                choice=choice,
                max_tokens=max_tokens,
                presence_penalty=0.5 if index % 3 == 0 else 0.0,
                prompt_logprobs=0 if index % 4 == 0 else None,
            )
            seqs.append(
                SeqSpec(
                    seq_id=SeqId(next_seq_id),
                    request_id=f"r{index}",
                    prompt_tokens=prompt,
                    params=params,
                )
            )
            next_seq_id += 1
        made.append(tuple(seqs))
    return tuple(made)


def disturbed(seed: int, **settings: object) -> ClusterWorld:
    """A world in which workers die at any moment, and new ones come."""
    rng = Random(seed)
    world = ClusterWorld(seed, **settings)  # type: ignore[arg-type]
    waiting = list(requests(seed % 10))
    while waiting or world.living:
        if waiting and rng.random() < 0.05:
            world.submit(waiting.pop(0))
        if rng.random() < 0.01 and world.workers:
            world.lose_worker(rng.choice(world.workers))
        missing = world.missing_roles
        if missing and (not world.can_decode or rng.random() < 0.03):
            world.add_worker(missing[-1] if not world.can_decode else rng.choice(missing))
        if rng.random() < 0.002 and world.living:
            world.cancel(rng.choice(list(world.living)))
        world.advance()
    world.run()
    return world


def check_outputs(world: ClusterWorld, seed: int) -> None:
    check_readers(world.fronts[0], seed)
    world.audit()


def check_readers(front: Front, seed: int) -> None:
    """The device has looked at the KV of every token already."""
    for spec in (spec for seqs in requests(seed % 10) for spec in seqs):
        tokens = expected_output(spec)
        end = front.ends[spec.seq_id]
        got = tuple(front.outputs.get(spec.seq_id, ()))
        if isinstance(end, Reject):
            assert end.status_hint in (429, 503)
            continue
        if spec.seq_id in front.is_cancelled:
            assert got == tokens[: len(got)]
            continue
        assert end.reason is FinishReason.LENGTH, end
        assert got == tokens
        scores = [score.token_id for score in front.scores.get(spec.seq_id, [])]
        wants_scores = spec.params.prompt_logprobs is not None
        assert scores == (list(spec.prompt_tokens[1:]) if wants_scores else [])


@pytest.mark.parametrize("seed", range(9))
def test_lost_workers_cost_no_token(seed: int) -> None:
    world = disturbed(seed, policy=("kv", "round_robin", "least_loaded")[seed % 3])
    check_outputs(world, seed)


SPLIT = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)


# In 101 a lost worker is given up by a prompt that was expected there, while others wait for room.
@pytest.mark.parametrize("seed", [*range(9), 101])
@pytest.mark.parametrize("handoff", ["always", "auto"])
def test_nor_does_a_hand_off_whatever_becomes_of_it(seed: int, handoff: str) -> None:
    """With short steps, so that prompts take several, of which the KV is copied meanwhile."""
    step_tokens = 16 if seed % 2 else 64
    world = disturbed(
        seed, roles=SPLIT, handoff=handoff, copy_failure_rate=0.1, step_tokens=step_tokens
    )
    check_outputs(world, seed)
    assert world.front.num_handoffs > 0 or handoff == "auto"
    assert world.num_copied_blocks > 0 or handoff == "auto"


@pytest.mark.parametrize("step_tokens", [16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_prefill_workers_compute_and_decode_workers_copy(seed: int, step_tokens: int) -> None:
    """Undisturbed: no token of a prompt's full blocks is computed twice."""
    world = ClusterWorld(seed, roles=SPLIT, num_blocks=(200,), step_tokens=step_tokens)
    for seqs in requests(seed):
        world.submit(seqs)
    world.run()
    check_readers(world.fronts[0], seed)
    assert world.front.num_migrations == 0
    num_long = sum(seqs[0].params.max_tokens > 1 for seqs in requests(seed))
    assert world.front.num_handoffs == num_long
    num_prompt = sum(len(spec.prompt_tokens) for seqs in requests(seed) for spec in seqs)
    num_output = sum(spec.params.max_tokens for seqs in requests(seed) for spec in seqs)
    by_role = dict.fromkeys(Role, 0)
    for worker in world.workers:
        assert worker.core.stats().num_lent_blocks == 0
        by_role[worker.role] += worker.core.stats().num_computed_tokens
    # At most the last block of each prompt, and the output.
    num_seqs = sum(len(seqs) for seqs in requests(seed))
    assert by_role[Role.DECODE] <= num_output + 16 * num_seqs
    assert by_role[Role.PREFILL] <= num_prompt


@pytest.mark.parametrize("roles", [SPLIT, (Role.PREFILL,)])
def test_what_ends_with_its_first_token_ends_where_its_prompt_is_computed(
    roles: tuple[Role, ...],
) -> None:
    world = ClusterWorld(0, roles=roles, num_blocks=(200,), step_tokens=16)
    for seqs in requests(0):
        world.submit(
            tuple(
                msgspec.structs.replace(
                    spec, params=msgspec.structs.replace(spec.params, max_tokens=1)
                )
                for spec in seqs
            )
        )
    world.run()
    for front in world.fronts:
        for spec in (spec for seqs in requests(0) for spec in seqs):
            assert tuple(front.outputs[spec.seq_id]) == expected_output(spec)[:1]
    assert world.front.num_handoffs == 0
    for worker in world.workers:
        assert (worker.core.stats().num_computed_tokens > 0) == (worker.role is Role.PREFILL)
        assert worker.core.stats().num_lent_blocks == 0


def streaming(seed: int) -> tuple[ClusterWorld, SeqSpec]:
    """A worker has blocks for a prompt of which another one has computed a part."""
    world = ClusterWorld(seed, roles=SPLIT, step_tokens=16)
    spec = SeqSpec(
        seq_id=SeqId(0),
        request_id="r",
        prompt_tokens=tuple(range(40)) * 3,
        params=SamplingParams(max_tokens=9),
    )
    world.submit((spec,))
    while not any(holds(worker) for worker in world.workers):
        world.advance()
    return world, spec


def holds(worker: Worker) -> bool:
    return worker.role is Role.DECODE and worker.core.stats().num_lent_blocks > 0


def finish(world: ClusterWorld, spec: SeqSpec) -> None:
    world.run()
    assert tuple(world.outputs[spec.seq_id]) == expected_output(spec)
    assert all(worker.core.stats().num_lent_blocks == 0 for worker in world.workers)


@pytest.mark.parametrize("seed", range(5))
def test_where_it_was_expected_it_goes_on(seed: int) -> None:
    world, spec = streaming(seed)
    (there,) = [worker for worker in world.workers if holds(worker)]
    assert there.core.stats().num_lent_blocks == len(spec.prompt_tokens) // 16
    finish(world, spec)
    assert there.core.stats().num_computed_tokens == 8 + len(spec.prompt_tokens) % 16


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("seed", range(5))
def test_either_may_be_lost_meanwhile(seed: int, role: Role) -> None:
    world, spec = streaming(seed)
    world.lose_worker(
        next(w for w in world.workers if w.role is role and w.core.stats().num_pinned_blocks)
    )
    finish(world, spec)
    assert world.front.num_migrations == (role is Role.PREFILL)


@pytest.mark.parametrize("seed", range(5))
def test_or_asked_to_leave_or_the_request_be_cancelled(seed: int) -> None:
    world, spec = streaming(seed)
    (there,) = [worker for worker in world.workers if holds(worker)]
    world.handle(WorkerDrain(there.lines[0].worker_id), world.fronts[0])
    finish(world, spec)
    assert there.core.stats().num_computed_tokens == 0
    world, spec = streaming(seed)
    world.cancel(spec.seq_id)
    world.run()
    assert all(worker.core.stats().num_pinned_blocks == 0 for worker in world.workers)


def test_workers_copy_prefixes_from_each_other() -> None:
    """Requests that begin alike go to several workers, and one computes what they share."""
    world = ClusterWorld(3, num_blocks=(64,), policy="round_robin")
    stem = tuple(range(48)) * 4
    for index in range(12):
        params = SamplingParams(max_tokens=30, seed=index)
        prompt = (*stem, index)
        seq_id = SeqId(index)
        world.submit((SeqSpec(seq_id=seq_id, request_id="", prompt_tokens=prompt, params=params),))
        if not index:
            world.run()
    world.run()
    assert [worker.core.stats().num_queried_tokens > 0 for worker in world.workers] == [True] * 3
    assert world.num_copied_blocks == 2 * len(stem) // 16
    num_computed = sum(worker.core.stats().num_computed_tokens for worker in world.workers)
    assert num_computed == len(stem) + 12 * 30


def test_the_worlds_of_these_tests_lose_workers_and_requests_go_on() -> None:
    worlds = [disturbed(seed) for seed in range(5)]
    assert sum(world.num_lost_workers for world in worlds) > 20
    assert sum(world.front.num_migrations for world in worlds) > 20


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_workers_of_every_role_and_of_unequal_pools_serve_together(seeds: range) -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.MIXED, Role.PREFILL, Role.DECODE)
    num_handoffs = num_migrations = 0
    for seed in seeds:
        world = disturbed(
            seed,
            roles=roles,
            num_blocks=(20, 64, 24),
            handoff="always" if seed % 2 else "auto",
            copy_failure_rate=0.02,
            step_tokens=32,
        )
        check_outputs(world, seed)
        num_handoffs += world.front.num_handoffs
        num_migrations += world.front.num_migrations
    assert num_handoffs > len(seeds)
    assert num_migrations > len(seeds)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_seeds() -> None:
    for seed in range(1000):
        check_outputs(disturbed(seed), seed)
        world = disturbed(
            seed, roles=SPLIT, handoff="always", copy_failure_rate=0.02, step_tokens=32
        )
        check_outputs(world, seed)


def test_a_request_that_has_lost_too_many_workers_ends_with_an_error() -> None:
    ((spec, *_), *_) = requests(0)
    spec = SeqSpec(
        seq_id=SeqId(0),
        request_id="r",
        prompt_tokens=spec.prompt_tokens,
        params=SamplingParams(max_tokens=100),
    )
    world = ClusterWorld(0, roles=(Role.MIXED,), max_migrations=1)
    world.submit((spec,))
    while not world.outputs.get(spec.seq_id):
        world.advance()
    world.lose_worker(world.workers[0])
    assert spec.seq_id in world.living
    world.add_worker(Role.MIXED)
    had = len(world.outputs[spec.seq_id])
    while len(world.outputs[spec.seq_id]) < had + 3:
        world.advance()
    world.lose_worker(world.workers[0])
    end = world.ends[spec.seq_id]
    assert isinstance(end, Finish)
    assert end.reason is FinishReason.ERROR
    assert end.error == "worker w0 was lost: killed (the request has lost 2 workers)"
    assert end.num_output_tokens == len(world.outputs[spec.seq_id])


def test_without_workers_that_decode_no_prompt_is_computed_and_nobody_hears_a_token() -> None:
    (seqs, *_) = requests(0)
    world = ClusterWorld(0, roles=(Role.PREFILL, Role.DECODE))
    world.lose_worker(world.workers[1])
    world.submit(seqs)
    world.run()
    for spec in seqs:
        end = world.ends[spec.seq_id]
        assert isinstance(end, Reject)
        assert (end.status_hint, end.code) == (503, "no_worker")
    assert world.workers[0].core.stats().num_steps == 0
    world.audit()


def test_a_choice_that_is_cancelled_between_two_workers_does_not_go_on() -> None:
    """One of two choices has its first token, and waits for the other one to be handed on with."""
    prompt = tuple(range(40))
    seqs = tuple(
        SeqSpec(
            seq_id=SeqId(choice),
            request_id="r",
            prompt_tokens=prompt,
            params=SamplingParams(max_tokens=30, choice=choice),
        )
        for choice in range(2)
    )
    for seed in range(20):
        world = ClusterWorld(seed, roles=SPLIT)
        world.submit(seqs)
        while not world.outputs.get(SeqId(0)):
            world.advance()
        world.cancel(SeqId(0))
        world.run()
        ends = [world.ends[SeqId(choice)] for choice in range(2)]
        assert [end.reason for end in ends if isinstance(end, Finish)] == ["cancelled", "length"]
        assert len(world.outputs[SeqId(0)]) < 30
        assert all(worker.core.stats().num_lent_blocks == 0 for worker in world.workers)
