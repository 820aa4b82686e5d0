"""No room, or no time: the status, the code, and when to come back."""

import json
from typing import Any

import pytest

from headrace.core.config.schema import SchedulerConfig
from headrace.models.text.template_wire import Limits
from headrace.server import prompts
from support.fake_engine import MODEL_NAME, formula_model
from support.http_server import RunningServer, running_server
from support.raw_http import CHAT, HELLO, Reply, ask, post, request_bytes

COMPLETIONS = "/v1/completions"


def ask_within(server: RunningServer, ttft_ms: str, **fields: Any) -> Reply:
    body = json.dumps({"model": MODEL_NAME, "prompt": "abc", "max_tokens": 3} | fields)
    headers = {"x-slo-ttft-ms": ttft_ms}
    return ask(server, request_bytes(COMPLETIONS, body.encode(), headers=headers))


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}], ids=str)
def test_who_would_wait_too_long_is_told_at_once(fields: dict[str, Any]) -> None:
    scheduler = SchedulerConfig(early_reject=True)
    with formula_model(scheduler=scheduler) as booted, running_server(booted) as server:
        reply = ask_within(server, "0.001", **fields)
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert (reply.error["code"], reply.error["type"]) == ("overloaded", "server_error")
        assert "predicted time to first token" in reply.error["message"]
        assert booted.executor.num_steps == 0
        assert ask_within(server, "60000", **fields).status == 200


def test_the_limit_alone_refuses_nobody() -> None:
    with formula_model() as booted, running_server(booted) as server:
        assert ask_within(server, "0.001").status == 200


def test_what_the_pool_can_never_hold_is_the_clients_to_change() -> None:
    with formula_model(num_blocks=4) as booted, running_server(booted) as server:
        reply = post(server, {"prompt": "x" * 60, "max_tokens": 10}, COMPLETIONS)
        assert reply.status == 400
        assert "retry-after" not in reply.headers
        assert reply.error["code"] == "kv_pool_too_small"
        assert "the pool has 4" in reply.error["message"]
        assert "--kv-memory" in reply.error["message"]
        assert post(server, {"prompt": "x" * 50, "max_tokens": 10}, COMPLETIONS).status == 200


def test_a_template_without_time_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "RENDER_WAIT_S", 0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with (
        formula_model(template_source=endless, limits=Limits(render_s=0.5)) as booted,
        running_server(booted) as server,
    ):
        reply = post(server, HELLO, CHAT)
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.error["code"] == "overloaded"
