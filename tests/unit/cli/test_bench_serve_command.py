"""`headrace bench serve`: what its flags mean, and which are refused."""

from pathlib import Path

import msgspec
import pytest

from headrace.bench.serve.run import Progress, SearchReport
from headrace.cli.bench_serve import as_held, check_writable, fitted_to, words_about
from headrace.cli.bench_serve_asked import base_of, rules_of, start_of, target_of, traffic_of
from headrace.cli.bench_serve_flags import JudgeFlags, ReportFlags, ServerFlags, TrafficFlags
from headrace.cli.bench_serve_progress import showing_runs
from headrace.cli.main import main
from headrace.core.base.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "there is no server to load"),
        ("--url ftp://x --rate 1", "--url is 'ftp://x'"),
        ("--url http://[::1 --rate 1", "--url is 'http://[::1'"),
        ("--url http://127.0.0.1:99999 --rate 1", "--url is 'http://127.0.0.1:99999'"),
        ("--url http://me:secret@127.0.0.1:1 --rate 1", "--url has credentials"),
        ("--url http://h:1 --metrics http://me:secret@h:1 --rate 1", "--metrics has credentials"),
        ("--url http://127.0.0.1:1 --rate 1 --api-key a\x01b", "the key has a character"),
        ("--url http://127.0.0.1:1", "nothing says when requests come"),
        ("--url http://127.0.0.1:1 --rate 1 --burst", "--rate and --burst say different times"),
        ("--url http://127.0.0.1:1 --rate 0", "--rate is 0"),
        ("--url http://127.0.0.1:1 --rate nan", "--rate is nan"),
        ("--url http://127.0.0.1:1 --ramp 0:1,x", "--ramp is '0:1,x'"),
        ("--url http://127.0.0.1:1 --ramp 0:1,5:inf", "its numbers are finite"),
        ("--url http://127.0.0.1:1 --ramp 5:1,0:2", "in the order of their times"),
        ("--url http://127.0.0.1:1 --search speed", "known: rate, concurrency"),
        ("--url http://127.0.0.1:1 --search rate --burst", "--search rate and --burst"),
        ("--url http://127.0.0.1:1 --rate 1 --endpoint embed", "known: chat, completions"),
        ("--url http://127.0.0.1:1 --rate 1 --extra-body [1]", "--extra-body is no JSON object"),
        ("--url http://127.0.0.1:1 --rate 1 --workload poems", "poems"),
        ("--url http://127.0.0.1:1 --trace nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("--url http://127.0.0.1:1 --rate 1 --warm-up-s 9 --duration-s 5", "--warm-up-s is 9"),
        ("--url http://127.0.0.1:1 --rate 1 --attainment 2", "--attainment is 2"),
        ("--url http://127.0.0.1:1 --rate 1", "lists no model: "),
    ],
)
def test_wrong_words(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *line.split()]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "secret" not in told


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "serve", "--url", "http://127.0.0.1:1", "--model", "m", "--rate", "1"]
    assert main(line) == 1
    assert "no connection" in capsys.readouterr().err


def test_addresses_with_and_without_the_path() -> None:
    assert base_of("http://h:1") == base_of("http://h:1/v1/") == "http://h:1"
    assert base_of("https://h/openai/v1") == "https://h/openai"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-environment")
    assert target_of("http://h", ServerFlags()).api_key == "of-environment"
    asked = target_of("http://h", ServerFlags(api_key="of-flag", extra_body="{}"))
    assert asked.headers["authorization"] == "Bearer of-flag"
    assert asked.extra_body == {}
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "authorization" not in target_of("http://h", ServerFlags()).headers


def test_clients_do_not_think_unless_told_and_sessions_do() -> None:
    judged = JudgeFlags()
    assert traffic_of(TrafficFlags(concurrency=2), judged).think_s == 0.0
    assert traffic_of(TrafficFlags(concurrency=2, think_s=3.0), judged).think_s == 3.0
    assert traffic_of(TrafficFlags(rate=2.0), judged).think_s is None
    assert traffic_of(TrafficFlags(), JudgeFlags(search="concurrency")).think_s == 0.0


def test_another_seed_each_time_unless_one_is_given() -> None:
    flags = TrafficFlags(rate=1.0)
    assert traffic_of(flags, JudgeFlags()).seed != traffic_of(flags, JudgeFlags()).seed
    assert traffic_of(TrafficFlags(rate=1.0, seed=5), JudgeFlags()).seed == 5


def test_limits_are_the_workloads_unless_they_are_stated() -> None:
    rules = rules_of(TrafficFlags(workload="rag"), JudgeFlags(ttft_ms=9.0))
    assert (rules.slo.ttft_ms, rules.slo.tpot_ms) == (9.0, 80.0)


def test_times_and_numbers() -> None:
    ramp = traffic_of(TrafficFlags(ramp="0:1,60:10", burstiness=2.0), JudgeFlags()).arrivals
    assert ramp is not None
    assert (ramp.rates, ramp.burstiness) == (((0.0, 1.0), (60.0, 10.0)), 2.0)
    assert traffic_of(TrafficFlags(rate=1.0), JudgeFlags()).num_requests == 200
    assert traffic_of(TrafficFlags(rate=1.0, duration_s=9.0), JudgeFlags()).num_requests > 10**5
    assert start_of(TrafficFlags(), JudgeFlags(search="rate")) == 1.0
    assert start_of(TrafficFlags(concurrency=3), JudgeFlags(search="concurrency")) == 3


def test_what_was_offered_in_words() -> None:
    for flags, words in (
        (TrafficFlags(rate=2.0, burstiness=4.0), "4 turns, 2 requests/s, gamma 4"),
        (TrafficFlags(concurrency=8, workload="rag"), "1 turn, 8 clients"),
        (TrafficFlags(ramp="0:1,9:2"), "Poisson, requests per second 0:1,9:2"),
        (TrafficFlags(burst=True), "all at once"),
    ):
        assert words_about(flags, traffic_of(flags, JudgeFlags())).endswith(words)


def test_prompts_must_fit() -> None:
    traffic = traffic_of(TrafficFlags(rate=1.0, workload="agent"), JudgeFlags())
    with pytest.raises(ConfigError, match="do not fit 2048 tokens"):
        fitted_to(traffic, 2048)
    assert fitted_to(traffic, 10_000).max_tokens == 10_000


@pytest.mark.parametrize(("shows_total", "ended"), [(True, "3 of 9 ended"), (False, "3 ended")])
def test_progress_is_a_line_now_and_then(
    shows_total: bool,
    ended: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = Progress(
        label="rate 2", num_ended=3, num_good=1, num_failed=1, num_in_flight=4, num_planned=9
    )
    with showing_runs(shows_total=shows_total) as show:
        show(now)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("headrace.cli.bench_serve_progress.EVERY_S", 0.0)
        show(now)
        assert capsys.readouterr().err == f"rate 2: {ended}, 1 good, 1 failed, 4 under way\n"


def test_files_that_cannot_be_written_are_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "serve", "--url", "http://127.0.0.1:1", "--model", "m", "--rate", "1"]
    assert main([*line, "--html", str(tmp_path)]) == 2
    assert f"{tmp_path}: cannot be written: is a directory" in capsys.readouterr().err
    kept = tmp_path / "kept.csv"
    kept.write_text("before")
    check_writable(ReportFlags(csv=str(kept), out=str(tmp_path / "new" / "out.json")))
    assert kept.read_text() == "before"
    assert not (tmp_path / "new" / "out.json").exists()


def test_what_was_offered_is_that_of_the_run_that_held() -> None:
    search = SearchReport(
        of="rate", demanded_attainment=0.9, held=4.0, failed=8.0, is_settled=False, trials=[]
    )
    assert as_held(TrafficFlags(rate=1.0), search).rate == 4.0
    clients = msgspec.structs.replace(search, of="concurrency")
    assert as_held(TrafficFlags(concurrency=2), clients).concurrency == 4
    assert as_held(TrafficFlags(rate=1.0), None).rate == 1.0
