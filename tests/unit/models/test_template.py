"""Chat templates as callers see them: texts, errors, and an end to whatever a hostile one does."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text.template import MAX_SOURCE_CHARS, ChatTemplate
from headrace.models.text.template_wire import Limits

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>Hi</b> & 'you' é 你好 🦀\n"},
]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
)
PLAIN_TEXT = "<s>system:Be brief.</s>user:<b>Hi</b> & 'you' é 你好 🦀\n</s>"

# Far above what an honest template takes on a busy machine.
LIMITS = Limits(render_s=0.5, memory_bytes=256 << 20)

# `big` is 10^9 and `many` 10^5 - 1: with names nothing is computed while the template is compiled.
SLOW = {
    "loops in loops": ""
    "{% for i in range(many) %}{% for j in range(many) %}{% endfor %}{% endfor %}",
    "growing integers": "{% set ns = namespace(x=big) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a power": "{{ big ** big }}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a long sort": "{% for i in range(many) %}{{ (range(many) | sort | list)[:0] }}{% endfor %}",
    "a sum of lists": "{% for i in range(999) %}"
    "{% set x = ([[0]] * (many // 10)) | sum(start=[]) %}{% endfor %}",
    "a search": "{% for i in range(many) %}{{ ('a' * many).find('a' * 499999 ~ 'b') }}{% endfor %}",
    "many lookups": "{% for i in range(many) %}{{ (range(many) | unique | list)[:0] }}{% endfor %}",
}
LARGE = {
    "a repeated text": "{{ 'x' * big }}",
    "a repeated list": "{{ big * [0] }}",
    "a padded number": "{{ '%*d' % (big, 1) }}",
    "a padded format": "{{ '{:{}}'.format(1, big) }}",
    "a padded filter": "{{ '%*d' | format(big, 1) }}",
    "a centred text": "{{ 'x'.center(big) }}",
    "a centred filter": "{{ 'x' | center(big) }}",
    "leading zeros": "{{ '1'.zfill(big) }}",
    "wide tabs": "{{ '\\t'.expandtabs(big) }}",
    "an indent": "{{ ('x\\n' * 9999) | indent(many) }}",
    "a spread": "{{ ('x' * many) | replace('x', 'y' * many) }}",
    "a join": "{{ ('x' * many).join('y' * many) }}",
    "pretty JSON": "{{ [[0] * 9999] | tojson(indent=big) }}",
    "a growing text": "{% set ns = namespace(s='x' * 999) %}"
    "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a growing list": "{% set ns = namespace(s=[0]) %}"
    "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a captured block": "{% set x %}"
    "{% for i in range(many) %}{{ 'x' * many }}{% endfor %}{% endset %}",
    "a filtered block": "{% filter upper %}{% for i in range(many) %}{{ 'x' * many }}{% endfor %}"
    "{% endfilter %}",
    "a slice": "{{ [0] | slice(big) | list | length }}",
    "a batch": "{{ [0] | batch(big, 0) | list | length }}",
}
FAILING = {
    "a long range": "{% for i in range(big) %}{% endfor %}",
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a long output": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
}
HOSTILE = SLOW | LARGE | FAILING
# One of each kind in the default run: most take all the time that they have.
TYPICAL = ("growing integers", "a repeated text", "a captured block", *FAILING)


@pytest.fixture(scope="module")
def hostile() -> Iterator[ChatTemplate]:
    """Does the harm that `harm` names, else what PLAIN does."""
    branches = "".join(
        f"{{% if harm == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items()
    )
    template = ChatTemplate(branches + PLAIN, bos_token="<s>", eos_token="</s>", limits=LIMITS)
    template.check()
    yield template
    template.close()


def made(source: str, limits: Limits | None = None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", limits=limits)


def fault(template: ChatTemplate, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        template.render(CHAT, **kwargs)
    return raised.value


def config_fault(source: str, limits: Limits | None = None) -> ConfigError:
    template = made(source, limits)
    with pytest.raises(ConfigError, match="cannot be compiled") as raised:
        template.check()
    template.close()
    return raised.value


# ---- what is asked and answered


def test_a_text_has_what_the_messages_have(hostile: ChatTemplate) -> None:
    assert hostile.render(CHAT) == PLAIN_TEXT


def test_a_text_of_any_characters_comes_back(hostile: ChatTemplate) -> None:
    odd = "\x00\ud800 \U0001f980\u2028\"'\\ {{ x }}"
    assert hostile.render([{"role": "user", "content": odd}]) == f"<s>user:{odd}</s>"


def test_messages_of_the_largest_body_pass() -> None:
    """8 MiB in the widest form that Python has for characters, within the limits of a server."""
    content = "x" * ((8 << 20) - 4) + "\U0001f980"
    template = made(PLAIN)
    assert template.render([{"role": "u", "content": content}]) == f"<s>u:{content}</s>"
    template.close()


def test_messages_that_are_no_data_are_refused(hostile: ChatTemplate) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for content in (object(), {1, 2}, loop):
        with pytest.raises(RequestError, match="plain data") as raised:
            hostile.render([{"content": content}])
        assert raised.value.param == "messages"


def test_messages_beyond_the_memory_are_refused(hostile: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="256 MiB"):
        hostile.render([{"content": "x" * (LIMITS.memory_bytes // 8)}])


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_arguments_take_no_reserved_names(hostile: ChatTemplate, name: str) -> None:
    assert fault(hostile, **{name: "x"}).param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "context", "loop"])
def test_arguments_may_have_names_that_python_uses(hostile: ChatTemplate, name: str) -> None:
    arguments: dict[str, Any] = {name: "x"}
    assert hostile.render(CHAT, **arguments) == PLAIN_TEXT


# ---- what a template says itself


def test_a_template_may_refuse_the_messages() -> None:
    template = made("{{ raise_exception(messages[0].content) }}")
    error = fault(template)
    assert (error.message, error.param, error.status_hint) == ("Be brief.", "messages", 400)
    with pytest.raises(RequestError) as raised:
        template.render([{"content": "é" * 100_000}])
    assert set(raised.value.message) == {"é"}
    assert len(raised.value.message) <= 1024
    template.close()


def test_a_failing_template_is_a_request_error() -> None:
    template = made(
        "{% if n == 0 %}{{ messages[0].content.x.y }}{% elif n == 1 %}{{ messages[0] + 1 }}"
        "{% elif n == 2 %}{{ 1 // (n - 2) }}{% elif n == 3 %}{{ missing() }}"
        "{% else %}{{ missing | tojson }}{% endif %}"
    )
    for n in range(5):
        error = fault(template, n=n)
        assert error.code == "chat_template"
        assert error.status_hint == 400
        assert "failed on these messages: " in error.message
    assert "'missing' is undefined" in fault(template, n=3).message
    template.close()


def test_a_source_that_is_no_template() -> None:
    assert "line 2: Expected an expression" in config_fault("\n{% for %}").message
    assert "unknown tag 'nothing'" in config_fault("{% nothing %}").message
    assert "No filter named 'no_filter'" in config_fault("{{ x | no_filter }}").message


def test_a_source_that_is_too_long_or_too_deep() -> None:
    with pytest.raises(ConfigError, match="longer than"):
        made("x" * (MAX_SOURCE_CHARS + 1))
    config_fault("{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_a_source_of_the_greatest_length_passes() -> None:
    source = "🦀" * MAX_SOURCE_CHARS
    template = made(source, Limits(output_chars=MAX_SOURCE_CHARS))
    template.check()
    assert template.render([]) == source
    template.close()


# ---- what a hostile template does


@pytest.mark.parametrize(
    "harm",
    [pytest.param(n, marks=() if n in TYPICAL else pytest.mark.slow) for n in HOSTILE],
)
def test_harm_has_an_end_and_leaves_no_trace(hostile: ChatTemplate, harm: str) -> None:
    hostile.render(CHAT)  # the worker is up
    started = time.monotonic()
    error = fault(hostile, harm=harm, big=10**9, many=99_999)
    assert time.monotonic() - started < LIMITS.render_s + 2.0
    assert error.code == "chat_template"
    assert len(error.message) < 300
    if harm in FAILING:
        assert "failed on these messages" in error.message
    else:
        assert error.status_hint == 500
        assert "--chat-template FILE" in error.hint
        assert "0.5 s" in error.message or "256 MiB" in error.message
    if harm in TYPICAL and harm in SLOW:
        assert "longer than 0.5 s" in error.message
    assert hostile.render(CHAT) == PLAIN_TEXT


def test_harm_while_compiling_has_an_end() -> None:
    """Jinja computes constants when it compiles."""
    error = config_fault("{{ 99999999 ** 99999999 }}", Limits(start_s=1.0))
    assert "longer than 1 s" in error.message
    assert "--chat-template FILE" in error.hint


# ---- many at once


def test_many_threads_get_their_own_texts(hostile: ChatTemplate) -> None:
    def text(i: int) -> str:
        return hostile.render([{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(text, range(400))) == [f"<s>user:{i}</s>" for i in range(400)]


def test_harm_fails_nobody_who_waits(hostile: ChatTemplate) -> None:
    with ThreadPoolExecutor(8) as pool:
        harmed = [pool.submit(fault, hostile, harm="loops in loops", many=99_999) for _ in range(2)]
        others = [pool.submit(hostile.render, CHAT) for _ in range(20)]
        assert {future.result() for future in others} == {PLAIN_TEXT}
        assert all("longer than" in future.result().message for future in harmed)
