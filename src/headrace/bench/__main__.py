"""`python -m headrace.bench PART` is `headrace bench PART`; without a part it is `all`.

The command line is described in a room above this one, so it is started and not imported.
"""

import os
import sys

HELP = ("-h", "--help")


def words(arguments: list[str]) -> list[str]:
    """The command line for `headrace` that these arguments mean."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in HELP):
        arguments = ["all", *arguments]
    return ["bench", *arguments]


if __name__ == "__main__":
    command = [sys.executable, "-m", "headrace.cli.main", *words(sys.argv[1:])]
    os.execv(sys.executable, command)
