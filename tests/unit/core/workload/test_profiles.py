"""Profiles are complete, and their names are those of the documents."""

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.workload.profiles import (
    CHAT,
    PROFILES,
    Importance,
    importance_words,
    profile_named,
)


def test_every_profile_says_what_matters() -> None:
    assert set(PROFILES) == {"chat", "agent", "rag"}
    for profile in PROFILES.values():
        assert set(profile.importance) == {"ttft", "tpot", "e2e", "throughput", "goodput"}
        assert Importance.CRITICAL in profile.importance.values()
        assert 0 <= profile.shared_share < 1
        assert "assumed" in profile.source


def test_a_limit_is_stated_for_what_is_critical() -> None:
    for profile in PROFILES.values():
        for figure in ("ttft", "tpot", "e2e"):
            if profile.importance[figure] is Importance.CRITICAL:
                assert getattr(profile.slo, f"{figure}_ms") is not None


def test_names_are_found_or_listed() -> None:
    assert profile_named("RAG").name == "rag"
    with pytest.raises(ConfigError, match="chat, agent, rag"):
        profile_named("batch")


def test_ranks_in_words_begin_with_the_highest() -> None:
    words = "critical: TTFT, TPOT, goodput; matters: throughput; minor: E2E"
    assert importance_words(CHAT) == words
