"""Clients hear of workers where there are workers, and of engines where there are engines."""

import pytest

from headrace.core.router.refusal import Noun, no_worker, queue_full, too_late

MESSAGES = {
    Noun.WORKER: [
        ("no worker came up within 2 s", "retry later"),
        ("3 requests wait for a worker, which is the limit", "retry later"),
        (
            "the request's time was over before a worker had room",
            "allow more time, or add workers",
        ),
    ],
    Noun.ENGINE: [
        ("no engine came up within 2 s", "retry later"),
        ("3 requests wait for an engine, which is the limit", "retry later"),
        (
            "the request's time was over before an engine had room",
            "allow more time, or add engines",
        ),
    ],
}


@pytest.mark.parametrize("noun", Noun)
def test_refusals_name_what_there_is(noun: Noun) -> None:
    refusals = [no_worker(1, 2.0, noun), queue_full(1, 3, 1.0, noun), too_late(1, noun)]
    assert [(one.message, one.hint) for one in refusals] == MESSAGES[noun]
