"""Lines of a published trace become requests, and what is none is told by its number."""

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.workload.traces import TraceRequest, parse_mooncake

LINE = '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}'


def test_a_line() -> None:
    (found,) = parse_mooncake([LINE, "", "  \n"])
    assert found == TraceRequest(
        arrival_s=1.5, prompt_tokens=700, output_tokens=5, blocks=(0, 7), block_tokens=512
    )


@pytest.mark.parametrize("line", ["{", "[]", LINE.replace("700", "0"), LINE.replace("0, 7", '"a"')])
def test_what_is_no_request(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        list(parse_mooncake([LINE, line]))
