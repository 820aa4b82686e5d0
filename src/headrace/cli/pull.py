"""`headrace pull`: fetch a model before it is needed."""

from headrace.cli.output import print_json, showing_progress
from headrace.cli.settings import load_settings
from headrace.models.hub import resolve_model


def pull(model: str | None, *, as_json: bool) -> int:
    config = load_settings(model=model).config
    with showing_progress() as report:
        path = resolve_model(config.model.path, lambda done, total: report("fetch", done, total))
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if as_json:
        size = sum(file.stat().st_size for file in files)
        print_json({"path": str(path), "num_files": len(files), "size_bytes": size})
    else:
        print(path)
    return 0
