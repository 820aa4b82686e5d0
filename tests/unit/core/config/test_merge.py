"""Layers: who wins, where a value came from, and that every fault is told."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import (
    DEFAULT,
    Layer,
    config_of,
    from_settings,
    merge,
    values_of,
)
from headrace.core.config.schema import Config
from headrace.core.config.settings import SETTINGS, Setting
from headrace.core.config.sources import (
    layer_from_toml,
    layers_from_environ,
    layers_from_flags,
)


def fault(*layers: Layer) -> str:
    with pytest.raises(ConfigError) as caught:
        merge(layers)
    return caught.value.message


def valid(setting: Setting) -> st.SearchStrategy[Any]:
    """Values that a setting may have."""
    if setting.choices:
        return st.sampled_from(setting.choices)
    if setting.type is bool:
        return st.booleans()
    if setting.type is str:
        return st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=5)
    if setting.type is tuple:
        return st.lists(st.text("ab:/=", min_size=1, max_size=5), max_size=3).map(tuple)
    low = 0 if setting.low is None else setting.low
    high = 1e9 if setting.high is None else setting.high
    if setting.type is int:
        return st.integers(int(low), int(high))
    return st.floats(low, high)


@st.composite
def keyed_values(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.sets(st.sampled_from(list(SETTINGS)), max_size=6))
    return {key: draw(valid(SETTINGS[key])) for key in sorted(keys)}


def nested(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def test_nothing_gives_the_defaults() -> None:
    config, sources = merge([])
    assert config == Config()
    assert set(sources.values()) == {DEFAULT}
    assert list(sources) == list(SETTINGS)


@given(st.lists(keyed_values(), max_size=4))
def test_the_last_layer_that_names_a_setting_wins(layers: list[dict[str, Any]]) -> None:
    config, sources = merge([Layer(f"layer {i}", nested(v)) for i, v in enumerate(layers)])
    for key, value in values_of(config).items():
        owners = [i for i, values in enumerate(layers) if key in values]
        if owners:
            assert value == layers[owners[-1]][key]
            assert sources[key] == f"layer {owners[-1]}"
        else:
            assert value == SETTINGS[key].default
            assert sources[key] == DEFAULT


def text_of(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return value if isinstance(value, str) else repr(value)


@given(keyed_values())
def test_a_value_and_its_text_mean_the_same(values: dict[str, Any]) -> None:
    texts = {key: text_of(value) for key, value in values.items()}
    assert merge([Layer("x", nested(texts))]).config == merge([Layer("x", nested(values))]).config


@given(keyed_values())
def test_merging_a_config_again_changes_nothing(values: dict[str, Any]) -> None:
    config = merge([Layer("x", nested(values))]).config
    assert merge([Layer("again", nested(values_of(config)))]).config == config
    assert config_of(values_of(config)) == config


def test_sources_of_every_kind() -> None:
    layers = [
        layer_from_toml(
            "a.toml", "[server]\nport = 1\nhost = '::1'\n[kv]\nmemory_bytes = '1GiB'\n"
        ),
        *layers_from_environ({"HEADRACE_SERVER_PORT": "2", "PATH": "/bin"}),
        *layers_from_flags({"server.max_n": "3", "server.host": None}),
    ]
    config, sources = merge(layers)
    assert (config.server.port, sources["server.port"]) == (2, "env HEADRACE_SERVER_PORT")
    assert (config.server.host, sources["server.host"]) == ("::1", "file a.toml")
    assert (config.server.max_n, sources["server.max_n"]) == (3, "flag --max-n")
    assert (config.kv.memory_bytes, sources["kv.memory_bytes"]) == (1 << 30, "file a.toml")


def test_all_faults_are_told_at_once() -> None:
    message = fault(
        layer_from_toml("a.toml", "[scheduler]\nstep_tokens = 0\norder = 'lifo'\n[sever]\nx = 1\n"),
        *layers_from_environ({"HEADRACE_SERVER_PORT": "http", "HEADRACE_CONFG": "x"}),
        *layers_from_flags({"kv.memory_bytes": "1GX"}),
    )
    head, *faults = message.splitlines()
    assert head == "6 settings are wrong"
    assert faults == [
        "scheduler.step_tokens is 0, the least is 1 (file a.toml)",
        "scheduler.order is 'lifo'; choose one of fcfs, priority, longest_prefix, slo_slack"
        " (file a.toml)",
        "unknown section sever (file a.toml); did you mean server?",
        "unknown variable HEADRACE_CONFG; did you mean HEADRACE_CONFIG?",
        "server.port is 'http', not a whole number (env HEADRACE_SERVER_PORT)",
        "kv.memory_bytes is '1GX', not a size such as 512MiB (flag --kv-memory)",
    ]


def test_a_fault_that_a_later_layer_hides_is_told() -> None:
    early, late = Layer("early", {"server": {"port": -1}}), Layer("late", {"server": {"port": 1}})
    assert fault(early, late) == "server.port is -1, the least is 0 (early)"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"server": {"prot": 1}}, "unknown setting server.prot (x); did you mean server.port?"),
        (
            {"server": {"threads": 1}},
            "unknown setting server.threads (x); did you mean device.threads?",
        ),
        ({"server": {"zzzzzz": 1}}, "unknown setting server.zzzzzz (x)"),
        ({"port": 1}, "unknown setting port (x); did you mean server.port?"),
        ({"zzzzzz": {}}, "unknown section zzzzzz (x)"),
        ({"server": 1}, "server is a section, not a value (x)"),
        ({"server": {"port": {"a": 1}}}, "server.port is {'a': 1}, not a whole number (x)"),
        ({"server": {"port": "9" * 90}}, f"server.port is {'9' * 57}..., the most is 65535 (x)"),
    ],
)
def test_unknown_names(values: dict[str, Any], message: str) -> None:
    assert fault(Layer("x", values)) == message


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("HEADRACE_PORT", "unknown variable HEADRACE_PORT; did you mean HEADRACE_SERVER_PORT?"),
        ("HEADRACE_KV_MEMORY", "did you mean HEADRACE_KV_MEMORY_BYTES?"),
        ("HEADRACE_SERVER_PROT", "did you mean HEADRACE_SERVER_PORT?"),
        ("HEADRACE_XYZZY_9", "unknown variable HEADRACE_XYZZY_9"),
    ],
)
def test_unknown_variables(variable: str, message: str) -> None:
    assert fault(*layers_from_environ({variable: "1"})).endswith(message)


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {"HEADRACE_CONFIG": "x", "HEADRACE_CACHE": "x", "HEADRACE_DEBUG": "1", "HOME": "x"}
    assert layers_from_environ(environ) == []


def test_an_empty_variable_is_a_value() -> None:
    _, sources = merge(layers_from_environ({"HEADRACE_MODEL_NAME": ""}))
    assert sources["model.name"] == "env HEADRACE_MODEL_NAME"
    assert "not a whole number" in fault(*layers_from_environ({"HEADRACE_SERVER_PORT": ""}))


def test_a_file_that_is_not_toml_is_a_fault_among_others() -> None:
    message = fault(
        layer_from_toml("a.toml", "[server\nport = 1"),
        *layers_from_environ({"HEADRACE_SERVER_PORT": "x"}),
    )
    assert message.splitlines()[0] == "2 settings are wrong"
    assert message.splitlines()[1].startswith("a.toml is not TOML: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 10_000, "a.toml is nested too deeply"),
        ("a = " + "{x=" * 10_000, "a.toml is nested too deeply"),
        ("a = " + "1" * 10_000, "a.toml is not TOML: "),
        ("server.port." + ".".join("x" * 2_000) + " = 1", "server.port is {'x': {'x': "),
        ("server.port = [" + "[" * 20 + "]" * 20 + "]", "server.port is [[[[[[[...]]]]]]]"),
    ],
    ids=["arrays", "tables", "number", "dotted", "nested"],
)
def test_a_file_of_any_depth_is_a_fault(text: str, said: str) -> None:
    message = fault(layer_from_toml("a.toml", text))
    assert message.startswith(said)
    assert "\n" not in message


def test_settings_from_python_go_by_name() -> None:
    config = from_settings({"path": "m.gguf", "step_tokens": 64, "memory_bytes": "1GiB"})
    assert config.model.path == "m.gguf"
    assert config.scheduler.step_tokens == 64
    assert config.kv.memory_bytes == 1 << 30
    with pytest.raises(ConfigError) as caught:
        from_settings({"step_token": 64, "threads": -1})
    assert caught.value.message.splitlines()[1:] == [
        "unknown setting step_token (argument); did you mean step_tokens?",
        "device.threads is -1, the least is 0 (argument)",
    ]
