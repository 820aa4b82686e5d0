"""What stands for sessions and tenants."""

import pytest

from headrace.server.callers import MAX_SESSION_CHARS, Tenants, session_of


@pytest.mark.parametrize(
    ("headers", "cache_key", "user", "session"),
    [
        ({}, None, None, ""),
        ({}, None, "u", "u"),
        ({}, "k", "u", "k"),
        ({"x-session-id": "h"}, "k", "u", "h"),
        ({"x-session-id": ""}, "", "u", "u"),
        ({}, "k" * 1000, None, "k" * MAX_SESSION_CHARS),
    ],
)
def test_a_session_is_what_the_header_names_or_else_the_body(
    headers: dict[str, str], cache_key: str | None, user: str | None, session: str
) -> None:
    assert session_of(headers, cache_key, user) == session


def test_a_tenant_is_a_key_and_a_salt() -> None:
    tenants = Tenants()
    cases = [
        ({}, "a"),
        ({}, "b"),
        (_key("a"), ""),
        (_key("b"), ""),
        (_key("a"), "a"),
        (_key(""), ""),
    ]
    names = [tenants.of(headers, salt) for headers, salt in cases]
    assert names == [tenants.of(headers, salt) for headers, salt in cases]
    assert len(set(names)) == len(cases)
    assert tenants.of({}) == tenants.of({"authorization": ""}) == ""


def test_no_key_and_salt_are_those_of_others() -> None:
    tenants = Tenants()
    assert tenants.of({"authorization": "ab"}, "c") != tenants.of({"authorization": "a"}, "bc")


def test_a_key_is_kept_nowhere_and_its_name_means_nothing_elsewhere() -> None:
    one, other = Tenants(), Tenants()
    assert one.of(_key("secret")) != other.of(_key("secret"))
    assert "secret" not in one.of(_key("secret"))


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
