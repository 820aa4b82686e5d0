import pytest

from headrace.cli.main import WRONG_USE, main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "parallel", "--gpus", "2.5"], '--gpus: "2.5" is not a whole number'),
        (["plan", "kv", "--length", "16", "--length", "20.5"], '--length: "20.5"'),
        (["sim", "--mixed", "2.7"], '--mixed: "2.7"'),
        (["plan", "parallel", "--gpus", "many"], '"many"'),
    ],
)
def test_a_fraction_is_no_whole_number(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == WRONG_USE
    assert told in capsys.readouterr().err


def test_a_whole_number_may_have_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "parallel", "--gpus", "2.0", "--json"]) == 0
    assert '"num_gpus": 2' in capsys.readouterr().out
