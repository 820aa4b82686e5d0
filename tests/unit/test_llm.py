"""The library face, over a model that is a formula."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import headrace
from headrace import llm
from headrace.core.base.errors import ConfigError, DeviceError, RequestError
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.boot import Booted
from headrace.llm import LLM
from headrace.models.text.tokenizer import Tokenizer
from support.fake_engine import IM_END, FakeBooted, Formula, formula_model, lower_case, saying

WAIT_S = 20.0


class Loaned:
    """A formula model as `boot` returns a real one."""

    def __init__(self, fake: FakeBooted) -> None:
        self.engine, self.text_engine = fake.engine, fake.text_engine
        self.chat_template = fake.chat_template
        self.executor = fake.executor
        self.config: Config | None = None
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


Make = Callable[..., tuple[LLM, Loaned]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    opened: list[Any] = []

    def make(
        formula: Formula = lower_case,
        *,
        scheduler: SchedulerConfig | None = None,
        has_template: bool = True,
        max_model_len: int = 2048,
        **settings: object,
    ) -> tuple[LLM, Loaned]:
        context = formula_model(
            formula, scheduler=scheduler, has_template=has_template, max_model_len=max_model_len
        )
        loaned = Loaned(context.__enter__())
        opened.append(context)

        def boot(config: Config, *, on_progress: object) -> Booted:
            loaned.config = config
            return cast(Booted, loaned)

        monkeypatch.setattr(llm, "boot", boot)
        return LLM(**settings), loaned  # type: ignore[arg-type]

    yield make
    for context in opened:
        context.__exit__(None, None, None)


def test_importing_headrace_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import headrace; t = time.perf_counter() - t;"
        "heavy = ('msgspec', 'torch', 'tokenizers', 'asyncio', 'jinja2');"
        "print(t, *(name for name in heavy if name in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *heavy = out.stdout.split()
    assert not heavy
    assert float(seconds) < 0.05


def test_the_package_has_the_names_it_says() -> None:
    assert headrace.LLM is LLM
    assert {getattr(headrace, name) for name in headrace.__all__} == {LLM, headrace.__version__}
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        headrace.LMM  # noqa: B018


def test_prompts_are_completed_in_their_order(make: Make) -> None:
    model, _ = make()
    prompts = [f"prompt {i}" for i in range(40)]
    done: list[tuple[int, int]] = []
    completions = model.generate(
        prompts, max_tokens=5, temperature=0.0, on_progress=lambda a, b: done.append((a, b))
    )
    assert [one.prompt for one in completions] == prompts
    assert done == [(i + 1, 40) for i in range(40)]
    for prompt, completion in zip(prompts, completions, strict=True):
        (output,) = completion.outputs
        assert completion.prompt_token_ids == tuple(prompt.encode())
        assert output.text == bytes(output.token_ids).decode()
        assert (len(output.token_ids), output.finish_reason) == (5, "length")
        # Alone it is the same.
        assert (
            model.generate(prompt, max_tokens=5, temperature=0.0)[0].outputs == completion.outputs
        )


def test_more_choices_than_the_window_still_fit_a_short_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "OPEN_CHOICES", 4)
    model, _ = make(scheduler=SchedulerConfig(max_waiting_seqs=4))
    completions = model.generate(["a"] * 50, max_tokens=3, n=2)
    assert [len(one.outputs) for one in completions] == [2] * 50


def test_a_prompt_may_be_text_or_tokens_one_or_many(make: Make) -> None:
    model, _ = make()
    ids = list(b"hello")
    for prompts, num in (("hello", 1), (ids, 1), (["hello", ids], 2), ([ids, ids], 2), ([], 0)):
        completions = model.generate(prompts, temperature=0.0)  # type: ignore[arg-type]
        assert len(completions) == num
        assert len({one.outputs[0].text for one in completions}) == min(num, 1)
        assert all(len(one.outputs[0].token_ids) == 16 for one in completions)
    assert model.generate(ids)[0].prompt is None


def test_options_reach_the_engine(make: Make) -> None:
    model, _ = make(saying("one two three", 5))
    (completion,) = model.generate(
        "hello", max_tokens=None, stop="two", logprobs=2, prompt_logprobs=0, n=2
    )
    for index, output in enumerate(completion.outputs):
        assert (output.index, output.text, output.stop_reason) == (index, "one ", "two")
        assert [one.token_id for one in output.logprobs] == list(output.token_ids) == [*b"one two"]
        assert all(len(one.top) == 2 for one in output.logprobs)
    assert [one.token_id for one in completion.prompt_logprobs] == [*b"ello"]
    (completion,) = model.generate("hello", max_tokens=None, stop=["three"], include_stop=True)
    assert completion.outputs[0].text == "one two three"
    (completion,) = model.generate("hello", max_tokens=None, skip_special_tokens=False)
    assert (completion.outputs[0].text, completion.outputs[0].finish_reason) == (
        "one two three",
        "stop",
    )
    (completion,) = model.generate("hello", stop_token_ids=[ord("w")])
    assert (completion.outputs[0].text, completion.outputs[0].stop_reason) == ("one t", ord("w"))
    (completion,) = model.generate("hello", logit_bias={ord("z"): 100.0}, max_tokens=3)
    assert completion.outputs[0].text == "zzz"


def test_a_seed_decides_and_none_is_another_each_time(make: Make) -> None:
    model, _ = make()
    texts = {model.generate("x", seed=7, max_tokens=30)[0].outputs[0].text for _ in range(3)}
    assert len(texts) == 1
    texts = {model.generate("x", max_tokens=30)[0].outputs[0].text for _ in range(3)}
    assert len(texts) == 3


def test_mistakes_are_named_before_anything_runs(make: Make) -> None:
    model, loaned = make()
    for options, error in (
        ({"temperature": 9.0}, RequestError),
        ({"max_tokens": 5000}, RequestError),
        ({"temprature": 1.0}, TypeError),
    ):
        with pytest.raises(error):
            model.generate(["good", "x"], **options)
    with pytest.raises(TypeError, match=r"options: top_logprobs; there are max_tokens, .*logprobs"):
        model.generate("x", logprobs=2, top_logprobs=2)  # type: ignore[call-arg]
    with pytest.raises(RequestError):
        model.generate(["good", ""])
    assert loaned.executor.num_steps == 0


def test_what_is_far_too_long_is_not_tokenised(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    model, _ = make()
    monkeypatch.setattr(Tokenizer, "encode", encode)
    endless = "long " * 20_000
    for ask in (
        lambda: model.generate(endless),
        lambda: model.chat([{"role": "user", "content": endless}]),
        lambda: list(model.stream(endless)),
    ):
        with pytest.raises(RequestError, match="prompt of at least"):
            ask()


def test_chat_renders_the_template(make: Make) -> None:
    model, _ = make(max_model_len=128)
    talk = [{"role": "user", "content": "hi"}]
    (completion,) = model.chat(talk, temperature=0.0)
    assert completion.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_token_ids.count(IM_END) == 1
    # Until the context is full: nobody asked for fewer.
    assert len(completion.prompt_token_ids) + len(completion.outputs[0].token_ids) == 128
    assert len(model.chat([talk, talk], max_tokens=2)) == 2
    with_template, _ = make(has_template=False)
    with pytest.raises(RequestError, match="no chat template"):
        with_template.chat(talk)


def test_a_stream_is_the_text_as_it_comes(make: Make) -> None:
    model, loaned = make(saying("héllo", 3))
    assert list(model.stream("say")) == [*"héllo"]
    with pytest.raises(RequestError, match="one choice"):
        list(model.stream("say", n=2))
    talker, loaned = make(lower_case)
    stream = talker.stream([{"role": "user", "content": "hi"}])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert loaned.engine.drain(WAIT_S)
    assert loaned.executor.num_steps < 1000


def test_a_failing_device_is_an_error(make: Make) -> None:
    model, loaned = make()
    loaned.executor.fails = True
    with pytest.raises(DeviceError, match="told to fail"):
        model.generate("x")
    with pytest.raises(DeviceError, match="told to fail"):
        list(model.stream("x"))


def test_settings_are_the_configurations(make: Make) -> None:
    _, loaned = make(
        model="m.gguf",
        max_model_len=77,
        threads=2,
        kv_memory="1GiB",
        kv_dtype="int8",
        step_tokens=9,
    )
    assert loaned.config is not None
    assert (loaned.config.model.path, loaned.config.kv.memory_bytes) == ("m.gguf", 1 << 30)
    assert (loaned.config.device.threads, loaned.config.scheduler.step_tokens) == (2, 9)
    assert loaned.config.kv.dtype == "int8"
    for wrong, meant in (
        ("thread", "threads"),
        ("dtype", "kv_dtype"),
        ("kv_memory_bytes", "kv_memory"),
    ):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            make(**{wrong: 2})
    with pytest.raises(ConfigError, match="step_tokens is -1"):
        make(step_tokens=-1)


def test_closing_is_idempotent_and_needs_no_call(make: Make) -> None:
    with make()[0] as model:
        loaned = cast(Loaned, model.booted)
        assert loaned.num_closed == 0
    assert loaned.num_closed == 1
    model.close()
    assert loaned.num_closed == 1
    forgotten, loaned = make()
    del forgotten
    gc.collect()
    assert loaned.num_closed == 1
