"""The schema as a list: names, spellings and limits."""

import dataclasses

import pytest

from headrace.core.config.schema import Config
from headrace.core.config.settings import SETTINGS


def parse(key: str, raw: object) -> object:
    return SETTINGS[key].parse(raw)


def test_every_field_of_the_schema_is_a_setting() -> None:
    keys = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(Config(), section.name))
    ]
    assert keys == list(SETTINGS)


def test_defaults_are_within_their_own_limits() -> None:
    for setting in SETTINGS.values():
        assert setting.parse(setting.default) == setting.default


@pytest.mark.parametrize("attribute", ["name", "flag", "variable"])
def test_names_are_unique(attribute: str) -> None:
    names = [getattr(setting, attribute) for setting in SETTINGS.values()]
    assert len(set(names)) == len(names)


def test_every_setting_has_help_of_one_line() -> None:
    for setting in SETTINGS.values():
        assert setting.help
        assert "\n" not in setting.help
        assert not setting.help.endswith(".")


@pytest.mark.parametrize(
    ("raw", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("1.5 gib", 3 << 29),
        ("2e9", 2_000_000_000),
        ("2E+9", 2_000_000_000),
        ("3kB", 3000),
        ("4k", 4000),
        ("1_000_000", 1_000_000),
        ("7B", 7),
        ("0", 0),
        (" 1 TiB ", 1 << 40),
        (4096, 4096),
        (2e9, 2_000_000_000),
    ],
)
def test_sizes(raw: object, num_bytes: int) -> None:
    assert parse("kv.memory_bytes", raw) == num_bytes


@pytest.mark.parametrize(
    "raw", ["", "GiB", "1GX", "-1GiB", "1e", "one", "nan", True, 1.5, [], None]
)
def test_what_is_no_size(raw: object) -> None:
    with pytest.raises(ValueError, match="not a size such as 512MiB"):
        parse("kv.memory_bytes", raw)


@pytest.mark.parametrize("raw", ["1e300GiB", "1e999", "9999999TiB"])
def test_sizes_beyond_any_memory(raw: str) -> None:
    with pytest.raises(ValueError, match=f"is {raw}, the most is 1024TiB"):
        parse("kv.memory_bytes", raw)


@pytest.mark.parametrize(
    ("raw", "value"), [("8080", 8080), (" 80 ", 80), (80.0, 80), ("1e3", 1000)]
)
def test_whole_numbers(raw: object, value: int) -> None:
    parsed = parse("server.port", raw)
    assert (parsed, type(parsed)) == (value, int)


@pytest.mark.parametrize("raw", ["", "8o", "80.5", 80.5, True, None, "8MiB", float("inf")])
def test_what_is_no_whole_number(raw: object) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse("server.port", raw)


@pytest.mark.parametrize(("raw", "value"), [("0.5", 0.5), (3, 3.0), ("3", 3.0), ("1e3", 1000.0)])
def test_numbers(raw: object, value: float) -> None:
    parsed = parse("scheduler.itl_target_ms", raw)
    assert (parsed, type(parsed)) == (value, float)


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", float("nan"), "", "x", True, 10**400])
def test_what_is_no_number(raw: object) -> None:
    with pytest.raises(ValueError, match="not a number"):
        parse("scheduler.itl_target_ms", raw)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        *(("true", True), ("YES", True), ("on", True), ("1", True), (True, True)),
        *(("false", False), ("no", False), ("Off", False), ("0", False), (False, False)),
    ],
)
def test_truth_values(raw: object, value: bool) -> None:
    assert parse("kv.prefix_cache", raw) is value


@pytest.mark.parametrize("raw", ["", "maybe", 1, 0.0, "2"])
def test_what_is_no_truth_value(raw: object) -> None:
    with pytest.raises(ValueError, match="not true or false"):
        parse("kv.prefix_cache", raw)


def test_a_text_stays_as_it_is() -> None:
    assert parse("model.name", " 12 ") == " 12 "
    with pytest.raises(ValueError, match="is 12, not a text"):
        parse("model.name", 12)


@pytest.mark.parametrize("control", ["\0", "\n", "\t", "\x1b", "\x7f", "\x9b"])
def test_a_text_is_one_line(control: str) -> None:
    with pytest.raises(ValueError, match=r"^has the control character '\\") as caught:
        parse("model.name", f"secret{control}")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="has the control character"):
        parse("cluster.engines", ["http://a", f"http://b{control}"])
    assert parse("model.name", "öl 7B 🛢") == "öl 7B 🛢"


def test_messages_carry_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"^is 0, the least is 1$"):
        parse("scheduler.step_tokens", "0")
    with pytest.raises(ValueError, match=r"^is 65536, the most is 65535$"):
        parse("server.port", 65536)
    with pytest.raises(ValueError, match=r"^is 'gpu'; choose one of native, torch$"):
        parse("device.backend", "gpu")
    with pytest.raises(ValueError, match=r"^is 0.001, the least is 0.01$"):
        parse("scheduler.itl_target_ms", "0.001")


def test_limits_in_words() -> None:
    assert SETTINGS["server.port"].limits == "0..65535"
    assert SETTINGS["device.backend"].limits == "native | torch"
    assert SETTINGS["kv.prefix_cache"].limits == "true | false"
    assert SETTINGS["model.name"].limits == "a text"
    assert SETTINGS["scheduler.itl_target_ms"].limits == "0.01..1000000"
