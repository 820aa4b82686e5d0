"""`headrace chat` and `headrace generate`, over an engine whose answers are known."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.cli.answer import Answerer
from headrace.cli.chat import Conversation
from headrace.cli.main import main
from headrace.cli.sampling import SamplingFlags
from headrace.core.base.errors import RequestError
from headrace.core.config.schema import Config
from support.fake_engine import FakeBooted, Formula, formula_model, lower_case

Capture = pytest.CaptureFixture[str]
Monkey = pytest.MonkeyPatch


@dataclass
class Boots:
    """Stands where `boot` is called, and keeps what it was called with."""

    model: FakeBooted
    config: Config | None = None
    num_closed: int = 0

    def __call__(self, config: Config, *, on_progress: Any) -> "Boots":
        self.config = config
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def close(self) -> None:
        self.num_closed += 1


@contextmanager
def booting(monkeypatch: Monkey, formula: Formula = lower_case, **model: Any) -> Iterator[Boots]:
    with formula_model(formula, **model) as booted:
        boots = Boots(booted)
        monkeypatch.setattr("headrace.cli.answer.boot", boots)
        yield boots


def say(monkeypatch: Monkey, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.fixture
def boots(monkeypatch: Monkey) -> Iterator[Boots]:
    with booting(monkeypatch) as boots:
        yield boots


def generate(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["generate", "--json", *arguments]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("text", ["", "\n"])
def test_generate_asks_for_a_prompt(
    boots: Boots, capsys: Capture, monkeypatch: Monkey, text: str
) -> None:
    say(monkeypatch, text)
    assert main(["generate"]) == 2
    assert "standard input holds no prompt" in capsys.readouterr().err
    assert boots.num_closed == 0


def test_generate_prints_the_answer(boots: Boots, capsys: Capture) -> None:
    assert main(["generate", "hi", "--max-tokens", "5", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == generate(capsys, "hi", "--max-tokens", "5", "--seed", "1")["text"] + "\n"
    assert len(out) == 6
    assert boots.num_closed == 2


def test_generate_reports_figures_with_units(boots: Boots, capsys: Capture) -> None:
    figures = generate(capsys, "hi", "--max-tokens", "5", "--seed", "7")
    # <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
    assert figures["num_prompt_tokens"] == 1 + 5 + 2 + 1 + 1 + 1 + 10
    assert figures["num_output_tokens"] == 5
    assert figures["finish_reason"] == "length"
    assert figures["seed"] == 7
    assert figures["model"] == "formula"
    assert 0 <= figures["ttft_ms"] <= figures["e2e_ms"]


def test_seeds(boots: Boots, capsys: Capture) -> None:
    flags = ("hi", "--max-tokens", "12")
    first = generate(capsys, *flags)
    assert generate(capsys, *flags, "--seed", str(first["seed"]))["text"] == first["text"]
    assert generate(capsys, *flags)["text"] != first["text"]


def test_raw_leaves_the_template_out(boots: Boots, capsys: Capture) -> None:
    assert generate(capsys, "hello", "--raw", "--max-tokens", "1")["num_prompt_tokens"] == 5


def test_a_system_message_goes_first(boots: Boots, capsys: Capture) -> None:
    short = generate(capsys, "hi", "--max-tokens", "1")["num_prompt_tokens"]
    long = generate(capsys, "hi", "--max-tokens", "1", "--system", "abc")["num_prompt_tokens"]
    assert long - short == 1 + len("system\nabc") + 1 + 1


def test_a_prompt_from_standard_input(boots: Boots, capsys: Capture, monkeypatch: Monkey) -> None:
    flags = ("--temperature", "0", "--max-tokens", "5")
    say(monkeypatch, "two\nlines\n")
    assert generate(capsys, "--raw", *flags)["num_prompt_tokens"] == 10
    say(monkeypatch, "two\nlines\n")
    answer = generate(capsys, *flags)
    assert (
        answer["num_prompt_tokens"] == generate(capsys, "two\nlines", *flags)["num_prompt_tokens"]
    )


def test_sampling_flags_reach_the_engine(boots: Boots, capsys: Capture) -> None:
    greedy = generate(capsys, "hi", "--temperature", "0", "--max-tokens", "9", "--seed", "1")
    same = generate(capsys, "hi", "--temperature", "0", "--max-tokens", "9", "--seed", "2")
    assert greedy["text"] == same["text"]
    stop = greedy["text"][3:5]
    cut = generate(capsys, "hi", "--temperature", "0", "--stop", stop, "--stop", "zzz")
    assert cut["text"] == greedy["text"][: greedy["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


def test_settings_reach_the_engine(boots: Boots, capsys: Capture) -> None:
    generate(capsys, "hi", "--model", "m.gguf", "--threads", "3", "--max-tokens", "1")
    assert boots.config is not None
    assert (boots.config.model.path, boots.config.device.threads) == ("m.gguf", 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "3"], "temperature of 3.0 is not within 0..2"),
        (["--top-p", "0"], "top_p of 0.0 is not above 0 and at most 1"),
        (["--max-tokens", "9999"], "max_tokens of 9999 exceed the model's 2048 tokens"),
    ],
)
def test_numbers_out_of_bounds(
    flags: list[str], message: str, boots: Boots, capsys: Capture
) -> None:
    assert main(["generate", "hi", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert boots.num_closed == 1


def test_no_template_is_told_with_what_to_do(capsys: Capture, monkeypatch: Monkey) -> None:
    with booting(monkeypatch, has_template=False):
        assert main(["generate", "hi"]) == 2
    assert "hint: headrace generate --raw" in capsys.readouterr().err


def test_a_step_that_fails_is_exit_code_1(capsys: Capture, monkeypatch: Monkey) -> None:
    with booting(monkeypatch) as boots:
        boots.model.executor.fails = True
        assert main(["generate", "hi", "--max-tokens", "3"]) == 1
    assert "told to fail" in capsys.readouterr().err


# ---- chat


def test_each_line_is_a_message(boots: Boots, capsys: Capture, monkeypatch: Monkey) -> None:
    say(monkeypatch, "one\n\n  \ntwo\n")
    assert main(["chat", "--max-tokens", "4", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [len(line) for line in out.splitlines()] == [4, 4]
    assert "\x1b" not in out


def test_commands_are_not_sent(boots: Boots, capsys: Capture, monkeypatch: Monkey) -> None:
    say(monkeypatch, "/help\n/nothing\n/reset\n/exit\nnever said\n")
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("/reset ")
    assert err == "error: unknown command /nothing\nhint: /help lists the commands\n"
    assert boots.model.executor.num_steps == 0


def test_a_refusal_ends_a_script(boots: Boots, capsys: Capture, monkeypatch: Monkey) -> None:
    say(monkeypatch, "x" * 4000 + "\nnever said\n")
    assert main(["chat"]) == 2
    assert "leaves no room within the model's 2048" in capsys.readouterr().err


@pytest.fixture
def conversation(boots: Boots) -> Conversation:
    sampling = SamplingFlags(temperature=0, max_tokens=6)
    return Conversation(Answerer(boots.model, sampling), "be brief")  # type: ignore[arg-type]


def test_turns_are_remembered_until_reset(conversation: Conversation) -> None:
    first = "".join(conversation.say("one"))
    second = "".join(conversation.say("two"))
    system = {"role": "system", "content": "be brief"}
    assert conversation.messages == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": second},
    ]
    conversation.reset()
    assert conversation.messages == [system]
    assert "".join(conversation.say("one")) == first


def test_later_turns_find_their_prefix(conversation: Conversation, boots: Boots) -> None:
    "".join(conversation.say("a message of more than one block of tokens"))
    "".join(conversation.say("again"))
    assert boots.model.engine.stats().num_hit_tokens >= 32


def test_an_answer_given_up_stays_as_far_as_it_came(conversation: Conversation) -> None:
    pieces = conversation.say("one")
    said = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": said}


def test_giving_up_cancels_the_sequence(boots: Boots) -> None:
    executor = boots.model.executor
    conversation = Conversation(Answerer(boots.model, SamplingFlags()), None)  # type: ignore[arg-type]
    pieces = conversation.say("one")
    next(pieces)
    pieces.close()
    assert boots.model.engine.drain(10)
    assert executor.num_steps < 2000


def test_a_refused_message_was_never_said(conversation: Conversation) -> None:
    before = conversation.messages
    with pytest.raises(RequestError):
        "".join(conversation.say("x" * 4000))
    assert conversation.messages == before


def test_a_model_cannot_drive_the_terminal(capsys: Capture, monkeypatch: Monkey) -> None:
    from headrace.cli.output import print_piece

    print_piece("a\x1b[31mb\tc\n")
    assert capsys.readouterr().out == "a\x1b[31mb\tc\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_piece("a\x1b[31mb\x9bc\td\n")
    assert (
        capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c\td\n"
    )


# ---- chat on a terminal


def type_in(monkeypatch: Monkey, *lines: str) -> None:
    """Lines typed at the prompt, then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_a_person_can_stop_an_answer_and_go_on(
    boots: Boots, capsys: Capture, monkeypatch: Monkey
) -> None:
    num_pieces = 0

    def interrupted(text: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 3:
            raise KeyboardInterrupt
        print(text, end="")

    type_in(monkeypatch, "one", "two")
    monkeypatch.setattr("headrace.cli.chat.print_piece", interrupted)
    assert main(["chat", "--temperature", "0", "--max-tokens", "6"]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.endswith(" [stopped]")
    assert len(second) == 6
    assert boots.model.engine.drain(10)


def test_a_person_can_go_on_after_a_refusal(
    boots: Boots, capsys: Capture, monkeypatch: Monkey
) -> None:
    type_in(monkeypatch, "x" * 4000, "two")
    assert main(["chat", "--temperature", "0", "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert len(out.splitlines()[1]) == 6
