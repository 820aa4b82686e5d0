"""Philox against the known answers that its authors publish with Random123."""

import pytest

from headrace.ops.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words


def test_a_draw_is_below_one_and_its_own() -> None:
    draws = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for choice in range(3)
        for position in range(100)
    }
    assert len(draws) == 4 * 3 * 100
    assert all(0 <= draw < 1 for draw in draws)


def test_a_draw_is_the_upper_53_bits_of_the_first_two_words() -> None:
    # The first of the known answers above.
    assert uniform(0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    seed, choice, position = 0x299F31D0A4093822, 3, 1234
    first, second, *_ = philox4x32((position, choice, 0, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, choice, position) == ((first << 32 | second) >> 11) / 2**53
