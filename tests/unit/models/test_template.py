"""Chat templates: the same text as `transformers`, the sandbox, and the bounds."""

import json
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text.template import MAX_OUTPUT_CHARS, ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>Hi</b> & 'you' é 你好\n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Weather?"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "naïve <tool>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' ~ message['content'] | trim ~ ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""
TOOL_USE = """{%- set ns = namespace(count=0, last='') %}
{%- macro show(tool, depth=2) -%}
{{ tool | tojson(indent=depth) }}
{%- endmacro %}
{% if tools is defined and tools %}
# Tools {{ tools | length }}
    {% for tool in tools %}
{{ loop.index }}/{{ loop.length }}{% if not loop.last %},{% endif %} {{ show(tool.function) }}
{{ tool | tojson }}
    {% endfor %}
{% endif %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.content is string and 'skip' in m.content %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = m.content[:3].upper() %}
    {{- loop.index0 % 2 }}:{{ m['content'].split(' ')[0] }}|
{%- else %}none{% endfor %}
{{ ns.count }} {{ ns.last }} {{ messages[::-1][0].role }} {{ style | default('plain') }}
{%- for i in range(3) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def fault(source: str, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        template(source).render(CHAT, **kwargs)
    return raised.value


def test_renders_tools_and_control_flow() -> None:
    """Texts of an independent implementation (`transformers` 5.24)."""
    text = template(TOOL_USE).render(CHAT, tools=TOOLS, style="x")
    assert text == (
        '# Tools 1\n1/1 {\n  "name": "weather",\n  "description": "naïve <tool>",\n'
        '  "parameters": {\n    "type": "object",\n    "properties": {\n      "city": {\n'
        '        "type": "string"\n      }\n    }\n  }\n}\n'
        '{"type": "function", "function": {"name": "weather", "description": "naïve <tool>",'
        ' "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}\n'
        "0:<b>Hi</b>|1:Hello!|0:Weather?|3 WEA user x01"
    )
    assert template(MISTRAL).render(CHAT) == (
        "<s> [INST] <b>Hi</b> & 'you' é 你好 [/INST] Hello!</s> [INST] Weather? [/INST]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", [SMOLLM, MISTRAL, TOOL_USE])
@pytest.mark.parametrize("tools", [None, TOOLS, TOOLS * 2])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, tools: Any, add_generation_prompt: bool) -> None:
    pytest.importorskip("torch")
    from transformers.utils.chat_template_utils import render_jinja_template

    for chat in (CHAT, CHAT[1:], CHAT[3:]):
        theirs, _ = render_jinja_template(
            conversations=[chat],
            tools=tools,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
            style="x",
        )
        ours = template(source).render(
            chat, tools=tools, add_generation_prompt=add_generation_prompt, style="x"
        )
        assert ours == theirs[0]


def test_json_escapes_nothing_for_html() -> None:
    text = template("{{ messages | tojson }}").render([{"content": '<é> & "q" \''}])
    assert text == '[{"content": "<é> & \\"q\\" \'"}]'
    assert json.loads(text) == [{"content": '<é> & "q" \''}]


def test_a_template_may_refuse_the_messages() -> None:
    error = fault("{{ raise_exception('roles must alternate') }}")
    assert error.message == "roles must alternate"
    assert error.param == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nothing %}", "{{ x | no_filter }}"])
def test_refuses_what_is_no_template(source: str) -> None:
    with pytest.raises(ConfigError, match="cannot be compiled"):
        template(source)


def test_refuses_a_huge_source() -> None:
    with pytest.raises(ConfigError, match="longer than"):
        template("x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError):
        template("{{ " + "(" * 5000 + ")" * 5000 + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.x.y }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing() }}",
        "{{ undefined_thing | tojson }}",
    ],
)
def test_a_failing_template_is_a_request_error(source: str) -> None:
    assert fault(source).code == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ namespace.__init__ }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update(role='x') %}",
        "{% set x = messages[0].clear() %}",
        "{{ lipsum() }}",
        "{{ strftime_now('%Y') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_nothing_escapes_the_sandbox(source: str) -> None:
    before = json.dumps(CHAT)
    try:
        text = template(source).render(CHAT)
    except RequestError:
        text = ""
    assert text == ""
    assert json.dumps(CHAT) == before


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%*d' | format(999999999, 1) }}",
        "{{ '%.*f' | format(999999999, 1.5) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x'.zfill(999999999) }}",
        "{{ {} | tojson(indent=999999999) }}",
        "{% set ns = namespace(s='x' * 1000) %}"
        "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x' * 1000) %}"
        "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x' * 1000) %}"
        "{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set s = 'x' * 1000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    ],
)
def test_work_and_size_are_bounded(source: str) -> None:
    error = fault(source)
    assert len(error.message) < 300


def test_modest_formats_are_free() -> None:
    text = template("{{ '{:>4}|{}'.format(7, 1732752000) }} {{ '%03d %s' | format(7, 'x') }}")
    assert text.render(CHAT) == "   7|1732752000 007 x"


def test_an_answer_of_the_largest_size_passes() -> None:
    line = "x" * (MAX_OUTPUT_CHARS // 16)
    assert len(template("{{ messages[0].content }}" * 16).render([{"content": line}])) > 1 << 20


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_arguments_take_no_reserved_names(name: str) -> None:
    error = fault("{{ bos_token }}", **{name: "x"})
    assert error.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "context", "loop"])
def test_arguments_may_have_names_that_python_uses(name: str) -> None:
    text = template("{{ messages | length }}")
    arguments: dict[str, Any] = {name: "x"}
    assert text.render(CHAT, **arguments) == str(len(CHAT))


def test_rendering_leaves_no_trace() -> None:
    counting = template(
        "{% set n = 1 %}{% for m in messages %}{{ n }}{% set n = n + 1 %}{% endfor %}"
    )
    assert counting.render(CHAT) == counting.render(CHAT) == "1111"
