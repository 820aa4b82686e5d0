"""Metrics pages of headrace and vLLM, and pages that are none."""

import pytest

from headrace.bench.serve.server_facts import facts_between, totals_of

VLLM = """\
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} {queried}
vllm:prefix_cache_queries_total{{engine="1"}} 100.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {hit}
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {num}
vllm:request_queue_time_seconds_sum {queue_s}
vllm:request_queue_time_seconds_count {num}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total 3.0
"""


def test_the_difference_of_two_pages() -> None:
    before = totals_of(VLLM.format(queried=100.0, hit=10.0, num=2, queue_s=1.0))
    after = totals_of(VLLM.format(queried=500.0, hit=110.0, num=12, queue_s=1.5))
    assert before["queried"] == 200.0
    found = facts_between(before, after)
    assert found is not None
    assert found.hit_rate == 0.25
    assert found.queue_ms == pytest.approx(50.0)
    assert found.num_preemptions == 0
    assert found.ttft_ms is None
    assert found.num_output_tokens is None


def test_own_names_come_before_those_of_others() -> None:
    page = "headrace_preemptions_total 2\nvllm:num_preemptions_total 2\n"
    assert totals_of(page) == {"preemptions": 2.0}


@pytest.mark.parametrize("page", ["", "<html>no</html>", "up 1\n", '{"error": {"message": "x"}}'])
def test_a_page_that_is_none(page: str) -> None:
    assert totals_of(page) == {}
    assert facts_between({}, {}) is None


def test_a_server_that_began_anew_has_no_facts() -> None:
    assert facts_between({"preemptions": 5.0}, {"preemptions": 1.0}) is None


def test_nothing_looked_up_has_no_rate() -> None:
    found = facts_between({"queried": 5.0, "hit": 1.0}, {"queried": 5.0, "hit": 1.0})
    assert found is not None
    assert found.hit_rate is None
