"""Load as several makers show it; what cannot be believed is unknown."""

import pytest

from headrace.cluster.gateway.load_page import load_of

# Lines as vLLM, SGLang and llama.cpp's server write them (their documents on metrics).
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b}"} 3.0
vllm:num_requests_running{engine="1",model_name="a{b}"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a{b}"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a{b}"} 0.0
vllm:num_requests_waiting_by_reason{engine="1"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a{b}"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a{b}"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:num_used_tokens{model_name="m"} 6400.0
sglang:max_total_num_tokens{model_name="m"} 12800.0
"""
LLAMA = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n"


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        (VLLM, (7, 1, 8000.0, 125)),
        (SGLANG, (5, 2, 6400.0, 100)),
        (LLAMA, (1, 4, None, None)),
        (LLAMA + SGLANG.replace("num_queue_reqs", "x"), (1, 4, None, None)),
    ],
)
def test_pages(page: str, figures: tuple[float, float, float | None, float | None]) -> None:
    load = load_of(page)
    assert load is not None
    assert (load.num_running, load.num_waiting) == figures[:2]
    assert (load.num_kv_tokens, load.num_free_blocks) == figures[2:]
    assert load.num_queued_prefill_tokens is None


@pytest.mark.parametrize(
    "page",
    [
        "",
        "vllm:num_requests_running 1\n",
        LLAMA.replace("4", "NaN"),
        LLAMA.replace("4", "+Inf"),
        LLAMA.replace("4", "-1"),
        LLAMA.replace("4", "four"),
        "# llamacpp:requests_processing 1\n# llamacpp:requests_deferred 4\n",
    ],
)
def test_what_is_missing_or_no_number_makes_the_load_unknown(page: str) -> None:
    assert load_of(page) is None


@pytest.mark.parametrize("usage", ["NaN", "-0.5"])
def test_a_pool_that_makes_no_sense_is_unknown(usage: str) -> None:
    load = load_of(VLLM.replace("0.25", usage))
    assert load is not None
    assert (load.num_kv_tokens, load.num_free_blocks) == (None, None)
