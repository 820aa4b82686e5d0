"""Settings of every test run: no network, no settings from outside, reproducible properties."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports the hub's client: a test never asks a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in [name for name in os.environ if name.startswith("HEADRACE_")]:
    if _name != "HEADRACE_CACHE":
        del os.environ[_name]

# A deadline would measure the machine's neighbours. The same examples on every run: a failure that
# was seen once can be seen again.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A server that ran in the main thread leaves signals ignored, which later tests' processes
    would inherit.
    """
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
