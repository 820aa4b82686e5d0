"""`headrace worker`: what it refuses before it connects to anybody."""

import pytest

from headrace.cli.worker import worker
from headrace.core.base.errors import ConfigError


@pytest.mark.parametrize("name", ["a b", "a\n", "ü", "n" * 65])
def test_a_name_fits_into_headers_and_labels(name: str) -> None:
    with pytest.raises(ConfigError, match="the worker's name is"):
        worker(["127.0.0.1:1"], "unread", role="mixed", name=name)


def test_a_role_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="--role is 'both'; choose one of"):
        worker(["127.0.0.1:1"], "unread", role="both", name="box")


@pytest.mark.parametrize("address", ["", "host", "host:70000"])
def test_an_address_has_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is no HOST:PORT"):
        worker([address], "unread", role="mixed", name="box")
