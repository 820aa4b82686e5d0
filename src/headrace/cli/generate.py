"""`headrace generate`: one prompt, one answer."""

import sys
from typing import Any

from headrace.cli.answer import answering
from headrace.cli.logs import start_logging
from headrace.cli.output import print_json, print_piece
from headrace.cli.sampling import SamplingFlags
from headrace.cli.settings import load_settings


def generate(
    prompt: str | None,
    model: str | None,
    flags: Any,
    sampling: SamplingFlags,
    *,
    system: str | None,
    is_raw: bool,
    as_json: bool,
) -> int:
    config = load_settings(flags, model=model).config
    start_logging(config.telemetry.log_level)
    text = sys.stdin.read() if prompt is None else prompt
    with answering(config, sampling) as answerer:
        if is_raw:
            answer = answerer.complete(text)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            answer = answerer.chat([*messages, {"role": "user", "content": text}])
        if as_json:
            said = "".join(answer)
            print_json({"model": answerer.model_name, "text": said, **answer.figures()})
            return 0
        for piece in answer:
            print_piece(piece)
        print()
    return 0
