"""The tables of docs/configuration.md, made from the schema.

    PYTHONPATH=src:tests python -m support.configuration_page

writes them into the page, between its two marks.
"""

from pathlib import Path

from headrace.cli.flags import shown_default
from headrace.core.config.settings import SECTIONS, SETTINGS, Setting
from headrace.core.config.sources import VARIABLES

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made from the schema -->", "<!-- end of what is made -->"
HEADER = "| setting | flag | default | values | meaning |\n|---|---|---|---|---|"


def updated(page: str) -> str:
    """The page with the tables as the schema is."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    text = ""
    for section in SECTIONS:
        rows = [_row(setting) for setting in SETTINGS.values() if setting.section == section]
        text += f"### {section}\n\n{HEADER}\n" + "".join(f"{row}\n" for row in rows) + "\n"
    text += "### Other variables\n\n| variable | meaning |\n|---|---|\n"
    text += "".join(f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items())
    return text


def _row(setting: Setting) -> str:
    flag = setting.flag
    if setting.type is bool:
        flag = f"{flag}` `--no-{flag[2:]}"
    if setting.key == "model.path":
        flag = "MODEL"
    values = setting.limits.replace("|", "\\|")
    cells = (f"`{setting.name}`", f"`{flag}`", shown_default(setting), values, setting.help)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
