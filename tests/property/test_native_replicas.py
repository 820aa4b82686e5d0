"""Replicas in C++ hold what dicts hold, whatever is added, removed and discarded."""

from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.core.router.replicas import NUM_PARTS, DictReplicas
from headrace.ops.native import _native

# Few parts, so that they grow and shrink, and few homes in them, so that names are moved.
NAMES = [
    bytes([0, index % 3 * 16, 0, 0, 0, 0, 0, index % 5 * 50]) + sha256(bytes([index])).digest()[:8]
    for index in range(120)
]
BITS = [1 << place for place in (0, 1, 2, 63, 64, 200)]


class ReplicasMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.known, self.tried = DictReplicas(), _native.Replicas()

    @rule(bit=st.sampled_from(BITS), names=st.lists(st.sampled_from(NAMES), max_size=60))
    def add(self, bit: int, names: list[bytes]) -> None:
        assert self.tried.add(bit, names) == self.known.add(bit, names)

    @rule(bit=st.sampled_from(BITS), names=st.lists(st.sampled_from(NAMES), max_size=60))
    def remove(self, bit: int, names: list[bytes]) -> None:
        assert self.tried.remove(bit, names) == self.known.remove(bit, names)

    @rule(part=st.sampled_from([0, 1, 2, NUM_PARTS - 1]), bits=st.sets(st.sampled_from(BITS)))
    def discard(self, part: int, bits: set[int]) -> None:
        assert self.tried.discard(part, sum(bits)) == self.known.discard(part, sum(bits))

    @invariant()
    def they_hold_the_same(self) -> None:
        assert dict(self.tried.items()) == dict(self.known.items())
        assert [self.tried.get(name) for name in NAMES] == [self.known.get(name) for name in NAMES]


ReplicasMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReplicasMachine = ReplicasMachine.TestCase
