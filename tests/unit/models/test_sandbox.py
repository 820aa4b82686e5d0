"""The dialect of chat templates: the same text as `transformers`, and nothing of Python."""

import json
from contextlib import suppress
from typing import Any

import pytest
from jinja2 import TemplateError

from headrace.models.text.sandbox import Refused, Sandbox

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


def render(source: str, messages: list[Any] = CHAT, max_chars: int = 1 << 20, **names: Any) -> str:
    names = {
        "messages": messages,
        "tools": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    } | names
    return Sandbox(source).render(names, max_chars)


def test_renders_tools_and_control_flow() -> None:
    """Texts of an independent implementation (`transformers` 5.24)."""
    assert render(TOOL_USE, tools=TOOLS, style="x") == (
        '# Tools 1\n1/1 {\n  "name": "weather",\n  "description": "naïve <tool>",\n'
        '  "parameters": {\n    "type": "object",\n    "properties": {\n      "city": {\n'
        '        "type": "string"\n      }\n    }\n  }\n}\n'
        '{"type": "function", "function": {"name": "weather", "description": "naïve <tool>",'
        ' "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}\n'
        "0:<b>Hi</b>|1:Hello!|0:Weather?|3 WEA user x01"
    )
    assert render(MISTRAL) == (
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
        ours = render(
            source, chat, tools=tools, add_generation_prompt=add_generation_prompt, style="x"
        )
        assert ours == theirs[0]


def test_json_escapes_nothing_for_html() -> None:
    text = render("{{ messages | tojson }}", [{"content": '<é> & "q" \''}])
    assert text == '[{"content": "<é> & \\"q\\" \'"}]'
    assert json.loads(text) == [{"content": '<é> & "q" \''}]


def test_formats_as_python_does() -> None:
    text = render("{{ '{:>4}|{}'.format(7, 1) }} {{ '%03d %s' | format(7, 'x') }} {{ '%s' % 2 }}")
    assert text == "   7|1 007 x 2"


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(Refused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nothing %}", "{{ x | no_filter }}"])
def test_refuses_what_is_no_template(source: str) -> None:
    with pytest.raises(TemplateError):
        Sandbox(source)


def test_a_text_ends_at_its_bound() -> None:
    assert render("{{ 'xy' }}{{ 'z' }}", max_chars=3) == "xyz"
    with pytest.raises(ValueError, match="longer than 2 characters"):
        render("{{ 'xy' }}{{ 'z' }}", max_chars=2)


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
    text = ""
    with suppress(TemplateError, TypeError):
        text = render(source)
    assert text == ""
    assert json.dumps(CHAT) == before


def test_nothing_is_left_to_chance() -> None:
    with pytest.raises(TemplateError, match="random"):
        Sandbox("{{ messages | random }}")


def test_rendering_leaves_no_trace() -> None:
    counting = Sandbox(
        "{% set n = 1 %}{% for m in messages %}{{ n }}{% set n = n + 1 %}{% endfor %}"
    )
    assert counting.render({"messages": CHAT}, 99) == counting.render({"messages": CHAT}, 99)
