"""What the fingerprint of an answer tells apart."""

from dataclasses import replace

import msgspec

from headrace.core.config.schema import ServerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live.boot import identity_of
from headrace.server.service import Answerer, Service
from support.fake_engine import formula_model
from support.live import worker_spec


def fingerprint(answerer: Answerer, *, special_tokens_in_content: bool = False) -> str:
    config = ServerConfig(special_tokens_in_content=special_tokens_in_content)
    service = Service(config, TelemetryConfig())
    service.attach(answerer)
    try:
        return service.enter().fingerprint
    finally:
        service.close()


def test_the_fingerprint_changes_with_all_that_changes_an_answer() -> None:
    with formula_model() as booted, formula_model(template_source="{{ messages }}") as other:
        seen = [
            fingerprint(booted),
            fingerprint(other),
            fingerprint(replace(booted, chat_template=None)),
            fingerprint(replace(booted, identity="another")),
            fingerprint(booted, special_tokens_in_content=True),
        ]
        assert len(set(seen)) == len(seen)
        assert fingerprint(booted) == seen[0]


def test_the_identity_changes_with_the_digest_and_the_type_of_keys() -> None:
    spec = worker_spec()
    seen = [
        identity_of(spec),
        identity_of(msgspec.structs.replace(spec, model_digest="11" * 32)),
        identity_of(msgspec.structs.replace(spec, kv_dtype="fp8")),
    ]
    assert len(set(seen)) == len(seen)
