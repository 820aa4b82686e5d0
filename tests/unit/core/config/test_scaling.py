"""Bounds of an autoscaler that leave it nothing to decide are told, wherever they were written."""

from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cli.settings import load_settings, served
from headrace.cluster.boot import boot_cluster
from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import merge
from headrace.core.config.scaling import scaling_faults
from headrace.core.config.sources import layer_from_toml, layers_from_environ, layers_from_flags


def faults(**values: Any) -> list[str]:
    """Of flags, by their keys with `__` in the place of the point."""
    flags = {key.replace("__", "."): value for key, value in values.items()}
    merged = merge(layers_from_flags({"autoscaler.enabled": True, **flags}))
    return list(scaling_faults(merged.config, merged.sources))


def test_bounds_that_fit_are_no_fault() -> None:
    assert faults() == []
    assert faults(autoscaler__min_replicas=8, autoscaler__max_replicas=8) == []
    assert faults(autoscaler__min_replicas=0, autoscaler__max_replicas=1) == []
    pools = {"cluster__prefill": 1, "cluster__decode": 1}
    assert faults(**pools, autoscaler__max_replicas=2, autoscaler__max_gpus=2) == []
    # Nothing is scaled.
    assert faults(autoscaler__enabled=False, autoscaler__min_replicas=9) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"autoscaler__min_replicas": 5, "autoscaler__max_replicas": 4},
            "autoscaler.min_replicas is 5 (flag --autoscaler-min-replicas), and"
            " autoscaler.max_replicas is 4 (flag --autoscaler-max-replicas), which is less; lower"
            " --autoscaler-min-replicas, or raise --autoscaler-max-replicas to 5",
        ),
        (
            {"autoscaler__min_replicas": 9},
            "autoscaler.min_replicas is 9 (flag --autoscaler-min-replicas), and"
            " autoscaler.max_replicas is 8 (default), which is less; lower"
            " --autoscaler-min-replicas, or raise --autoscaler-max-replicas to 9",
        ),
        (
            {
                "autoscaler__min_replicas": 5,
                "cluster__prefill": 1,
                "cluster__decode": 1,
            },
            "autoscaler.min_replicas is 5 (flag --autoscaler-min-replicas) for each of 2 pools, 10"
            " in all, and autoscaler.max_replicas is 8 (default), which is less; lower"
            " --autoscaler-min-replicas, or raise --autoscaler-max-replicas to 10",
        ),
        (
            {"cluster__workers": 6, "autoscaler__max_replicas": 4},
            "6 workers are there at the begin (cluster.workers is 6 (flag --workers)), and"
            " autoscaler.max_replicas is 4 (flag --autoscaler-max-replicas), which is less; begin"
            " with fewer, or raise --autoscaler-max-replicas to 6",
        ),
        (
            {"cluster__prefill": 2, "cluster__decode": 1, "autoscaler__max_gpus": 2},
            "3 workers are there at the begin (cluster.prefill is 2 (flag --prefill) +"
            " cluster.decode is 1 (flag --decode)), and autoscaler.max_gpus is 2"
            " (flag --autoscaler-max-gpus), which is less; begin with fewer, or raise"
            " --autoscaler-max-gpus to 3",
        ),
        (
            {"cluster__engines": ("http://127.0.0.1:9001",), "autoscaler__max_replicas": 1},
            "autoscaler.enabled is true (flag --autoscale), and cluster.engines is"
            " http://127.0.0.1:9001 (flag --engine): engines that run elsewhere cannot be started"
            " or ended here; leave out --autoscale, or --engine",
        ),
    ],
)
def test_each_is_told_with_values_limits_and_what_helps(
    values: dict[str, Any], message: str
) -> None:
    assert faults(**values) == [message]


def test_wherever_they_were_written() -> None:
    file = layer_from_toml("a.toml", "[autoscaler]\nenabled = true\nmin_replicas = 5")
    merged = merge([file, *layers_from_environ({"HEADRACE_AUTOSCALER_MAX_REPLICAS": "4"})])
    (message,) = scaling_faults(merged.config, merged.sources)
    assert "autoscaler.min_replicas is 5 (file a.toml)" in message
    assert "autoscaler.max_replicas is 4 (env HEADRACE_AUTOSCALER_MAX_REPLICAS)" in message


def test_commands_refuse_them_all_at_once() -> None:
    environ = {
        "HEADRACE_AUTOSCALER_ENABLED": "true",
        "HEADRACE_AUTOSCALER_MIN_REPLICAS": "3",
        "HEADRACE_AUTOSCALER_MAX_REPLICAS": "2",
        "HEADRACE_CLUSTER_WORKERS": "4",
    }
    with pytest.raises(ConfigError) as caught:
        served(load_settings(environ=environ))
    head, *rest = caught.value.message.split("\n")
    assert (head, len(rest)) == ("the bounds of the autoscaler leave nothing to decide", 2)


def test_serve_and_doctor_tell_them(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--autoscale", "--engine", "http://127.0.0.1:9"]
    assert main(["serve", *asked]) == 2
    assert "cannot be started or ended here" in capsys.readouterr().err
    main(["doctor", *asked])
    assert "cannot be started or ended here" in capsys.readouterr().out


def test_whoever_boots_a_cluster_by_hand_hears_of_them_too() -> None:
    config = merge(
        layers_from_flags({"autoscaler.enabled": True, "autoscaler.min_replicas": 9})
    ).config
    with pytest.raises(ConfigError, match=r"autoscaler\.min_replicas is 9, and"):
        boot_cluster(config)
