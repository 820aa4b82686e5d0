"""`headrace generate`: one prompt, one answer."""

import sys
from typing import Any

from headrace.cli.answer import answering
from headrace.cli.logs import start_logging
from headrace.cli.output import print_json, print_piece
from headrace.cli.sampling import SamplingFlags
from headrace.cli.settings import load_settings
from headrace.core.base.errors import ConfigError


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
    if prompt is None:
        prompt = sys.stdin.read()
        if not is_raw:
            # The end of the last line is the shell's, not the message's.
            prompt = prompt.removesuffix("\n")
        if not prompt:
            raise ConfigError(
                "standard input holds no prompt",
                hint="headrace generate PROMPT [MODEL], or pipe one in",
            )
    with answering(config, sampling) as answerer:
        if is_raw:
            answer = answerer.complete(prompt)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            answer = answerer.chat([*messages, {"role": "user", "content": prompt}])
        if as_json:
            said = "".join(answer)
            print_json({"model": answerer.model_name, "text": said, **answer.figures()})
            return 0
        for piece in answer:
            print_piece(piece)
        print()
    return 0
