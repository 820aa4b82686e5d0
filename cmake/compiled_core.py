"""Translate the machines' Python into C with mypyc. CMake runs this: SOURCE_DIR OUTPUT_DIR.

Writes sources.cmake beside the C: one `headrace_add_extension(module sources)` for each extension module, and where
mypyc's own C is.

Translated is what only decides. Structs are what msgspec makes of a class body, and an exception that others derive
from has to stay a class of Python's own; modules with either are left as they are, and are imported by the others.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mypyc.build import include_dir, mypycify

ROOMS = ("core", "sim")
# Words, and schemas that are read by their fields: nothing there takes time.
LEFT = ("headrace/core/base", "headrace/core/config")


def is_compiled(path: Path) -> bool:
    if path.name == "__init__.py" or path.as_posix().startswith(LEFT):
        return False
    classes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    return not any("Struct" in ast.unparse(base) for of in classes for base in of.bases)


def modules() -> Iterator[str]:
    """Paths below the source folder, which is the working one: tracebacks show them."""
    for room in ROOMS:
        yield from (
            str(path) for path in sorted(Path("headrace", room).rglob("*.py")) if is_compiled(path)
        )


def main(source_dir: str, output_dir: str) -> None:
    os.chdir(source_dir)
    config = f"{output_dir}/mypy.ini"
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    # The package's face, of which core/ knows nothing, would lead to every other room and its libraries.
    Path(config).write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-headrace.llm]\nfollow_imports = skip\n"
    )
    options = [f"--config-file={config}", f"--cache-dir={output_dir}/mypy_cache"]
    extensions = mypycify(
        [*options, *modules()],
        multi_file=True,  # so that two cores have something to do
        group_name="headrace.compiled",
        target_dir=output_dir,
    )
    lines = [f'set(MYPYC_INCLUDE_DIR "{include_dir()}")\n']
    lines += [f"headrace_add_extension({of.name} {' '.join(of.sources)})\n" for of in extensions]
    Path(output_dir, "sources.cmake").write_text("".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
