"""What a checker sees of the library's face. Never run; `make check` reads it."""

from collections.abc import Iterator
from typing import assert_type

from headrace import LLM
from headrace.llm import Completion


def answers_have_types(llm: LLM) -> None:
    assert_type(llm.generate("one", max_tokens=4), list[Completion])
    assert_type(llm.generate(["one", "two"], temperature=0, stop=["."]), list[Completion])
    assert_type(llm.generate([[1, 2], [3]], logit_bias={5: -1.0}), list[Completion])
    assert_type(llm.stream("one", seed=3), Iterator[str])
    answer = llm.chat([{"role": "user", "content": "hello"}])[0]
    assert_type(answer.outputs[0].text, str)
    assert_type(answer.prompt, str | None)


def misspelt_and_mistyped_parameters_are_seen(llm: LLM) -> None:
    llm.generate("one", max_token=4)  # type: ignore[call-arg]
    llm.generate("one", temperature="hot")  # type: ignore[arg-type]
    llm.generate(3)  # type: ignore[arg-type]


def a_model_closes_itself() -> None:
    with LLM("model.gguf", threads=2) as llm:
        assert_type(llm, LLM)
