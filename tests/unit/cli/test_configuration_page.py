"""The page about the configuration says what the schema says."""

import re

from headrace.cli.app import app
from headrace.core.config.merge import merge
from headrace.core.config.settings import SETTINGS
from headrace.core.config.sources import layer_from_toml
from support.configuration_page import BEGIN, PAGE, updated


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text()
    hint = "run: PYTHONPATH=src:tests python -m support.configuration_page"
    assert updated(page) == page, hint


def test_every_setting_has_a_row() -> None:
    made = PAGE.read_text().partition(BEGIN)[2]
    rows = re.findall(r"^\| `([a-z_0-9]+)` \| `", made, re.MULTILINE)
    assert rows == [setting.name for setting in SETTINGS.values()]


def test_the_example_file_is_right() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config, sources = merge([layer_from_toml("example", example)])
    assert config.kv.memory_bytes == 1 << 30
    assert sources["server.port"] == "file example"


def test_every_command_is_on_its_page() -> None:
    page = (PAGE.parent / "cli.md").read_text()
    commands = {name for name in app if not name.startswith("-")}
    headings = set(re.findall(r"^## headrace (\w+)", page, re.MULTILINE))
    assert headings == commands
