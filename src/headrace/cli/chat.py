"""`headrace chat`: a conversation, line by line."""

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from headrace.cli.answer import Answerer, answering
from headrace.cli.logs import start_logging
from headrace.cli.output import console, print_piece, report_error
from headrace.cli.sampling import SamplingFlags
from headrace.cli.settings import load_settings
from headrace.core.base.errors import RequestError

HELP = """\
/reset   forget what was said
/help    this list
/exit    leave; so does Ctrl-D
Ctrl-C while an answer comes stops the answer."""


def chat(model: str | None, flags: Any, sampling: SamplingFlags, *, system: str | None) -> int:
    config = load_settings(flags, model=model).config
    start_logging(config.telemetry.log_level)
    is_terminal = sys.stdin.isatty()
    with answering(config, sampling) as answerer:
        conversation = Conversation(answerer, system)
        if is_terminal:
            console().print(f"[bold]{answerer.model_name}[/]: /help lists what else can be said")
        for line in _lines(is_terminal):
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/reset":
                    conversation.reset()
                case "/help":
                    print(HELP)
                case command if command.startswith("/") and " " not in command:
                    report_error(f"unknown command {command}\nhint: /help lists the commands")
                case text:
                    _answer(conversation, text, is_terminal)
    return 0


class Conversation:
    """What was said. Each turn sends all of it; the prefix cache keeps that from being computed
    again.
    """

    def __init__(self, answerer: Answerer, system: str | None) -> None:
        self._answerer = answerer
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._system)

    def reset(self) -> None:
        self.messages = list(self._system)

    def say(self, text: str) -> Generator[str, None, None]:
        """The answer as it comes. An answer that is given up stays as far as it came; a message
        that is refused was never said.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = self._answerer.chat(messages)
        pieces: list[str] = []
        try:
            for piece in answer:
                pieces.append(piece)
                yield piece
        finally:
            if pieces or answer.finish is not None:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _lines(is_terminal: bool) -> Iterator[str]:
    """The lines of standard input; on a terminal with a prompt, and line editing where there is
    any.
    """
    if not is_terminal:
        yield from sys.stdin
        return
    try:
        import readline  # noqa: F401  input() uses it
    except ImportError:
        print("line editing is not available", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _answer(conversation: Conversation, text: str, is_terminal: bool) -> None:
    """Print an answer. A person can go on after a refusal; a script is told by the exit code."""
    try:
        with closing(conversation.say(text)) as pieces:
            for piece in pieces:
                print_piece(piece)
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print(" [stopped]", end="")
    except RequestError as error:
        if not is_terminal:
            raise
        report_error(str(error))
        return
    print()
