"""How many seeds a test takes: a few by default, a thousand among the slow ones."""

import pytest

FEW_AND_A_THOUSAND = [
    pytest.param(range(3), id="few"),
    pytest.param(range(1000), id="thousand", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
