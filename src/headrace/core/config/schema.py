"""The one configuration schema. Frozen; resolved once; no component receives the whole of it.

Each field's metadata carries its help line and bounds, so that the command line, `headrace explain
config` and the error messages speak from one source.
"""

from dataclasses import dataclass

from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.config.cluster import ClusterConfig as ClusterConfig
from headrace.core.config.field import setting
from headrace.core.config.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = setting(
        "", "GGUF file, safetensors folder or hub id; empty = the default model", flag="--model"
    )
    name: str = setting(
        "", "name that clients use; empty = derived from the file", flag="--model-name"
    )
    max_model_len: int = setting(
        0,
        "most tokens of one sequence, prompt and output; 0 = the model's own limit",
        low=0,
        high=10_000_000,
    )
    chat_template: str = setting(
        "", "file with a Jinja chat template that replaces the model's own"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    backend: str = setting("native", "what computes", choices=("native", "torch"))
    threads: int = setting(
        0, "worker threads; 0 = the cores this process may use", low=0, high=1024
    )
    isa: str = setting(
        "auto",
        "instruction set of the native backend",
        choices=("auto", "amx", "avx512", "avx2", "neon", "portable"),
    )
    activations: str = setting(
        "auto",
        "least precision that linear layers may round their inputs to",
        choices=("auto", "f32", "bf16", "int12", "int8"),
    )
    attention: str = setting(
        "auto",
        "f32: exact; bf16: as AMX multiplies, with the same bits on every CPU; auto: bf16 with AMX",
        choices=("auto", "f32", "bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    memory_bytes: int = setting(
        0,
        "size of the KV pool, as 1073741824 or 1GiB; 0 = chosen from free memory",
        low=0,
        high=1 << 50,
        flag="--kv-memory",
    )
    dtype: str = setting(
        "bf16",
        "how keys and values are stored; int8 and fp8 take about half the memory",
        choices=("bf16", "int8", "fp8"),
        flag="--kv-dtype",
    )
    prefix_cache: bool = setting(True, "keep finished blocks and share equal prefixes")
    load_timeout_s: float = setting(
        1.0,
        "longest wait for KV from another worker before it is computed here",
        low=0.001,
        high=3600,
        flag="--kv-load-timeout-s",
    )
    lease_s: float = setting(
        10.0,
        "how long KV is held for a worker that is to copy it",
        low=0.01,
        high=3600,
        flag="--kv-lease-s",
    )
    nixl: str = setting(
        "",
        "network device, as UCX calls it, for KV between machines by NIXL, or auto; empty = TCP",
        flag="--kv-nixl",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    step_tokens: int = setting(512, "most tokens computed in one step", low=1, high=1_000_000)
    chunk_tokens: int = setting(
        0, "most prompt tokens of one sequence in one step; 0 = step_tokens", low=0, high=1_000_000
    )
    max_running_seqs: int = setting(256, "most sequences in one step", low=1, high=65_536)
    max_waiting_seqs: int = setting(
        4096, "longest queue; beyond it requests are refused with 429", low=0, high=10_000_000
    )
    overlap: str = setting(
        "auto",
        "plan a step while the one before it runs; auto = where steps only decode, within 20 ms",
        choices=("auto", "on", "off"),
    )
    order: str = setting(
        "fcfs", "who is admitted first", choices=("fcfs", "priority", "longest_prefix", "slo_slack")
    )
    budget: str = setting(
        "itl",
        "how a step's token budget is chosen: step_tokens, or what keeps the ITL target",
        choices=("fixed", "itl"),
    )
    itl_target_ms: float = setting(
        50.0,
        "inter-token latency that the `itl` budget keeps for requests that state none",
        low=0.01,
        high=1e6,
    )
    itl_margin: float = setting(
        0.1, "share of the ITL target that the `itl` budget leaves unplanned", low=0, high=0.99
    )
    min_prefill_tokens: int = setting(
        8,
        "tokens of short prompts that fit into a step whatever the ITL target",
        low=1,
        high=1_000_000,
    )
    short_prompt_tokens: int = setting(
        512, "longest prompt, beside what is cached, of the short lane", low=0, high=10_000_000
    )
    long_step_ms: float = setting(
        250.0,
        "longest step of the `itl` budget in a burst, or with a long prompt while nobody decodes; "
        "two fifths of it while short prompts come now and then",
        low=0.01,
        high=1e6,
    )
    short_prompt_share: float = setting(
        0.75,
        "share of a step's time for prompts that the short lane has while long ones run too",
        low=0.01,
        high=0.99,
    )
    max_long_prefills: int = setting(
        2, "long prompts that are computed in turns; others wait", low=1, high=65_536
    )
    admission: str = setting(
        "predicted",
        "what a new sequence must find room for",
        choices=("predicted", "optimistic", "no_evict"),
    )
    predicted_output_tokens: int = setting(
        128, "output that `predicted` admission reserves, at most max_tokens", low=0, high=1_000_000
    )
    early_reject: bool = setting(False, "refuse a request whose predicted TTFT misses its SLO")
    skip_ahead_window: int = setting(
        64, "waiting sequences looked at behind one that does not fit", low=0, high=65_536
    )
    skip_ahead_age_ms: float = setting(
        2000.0, "age at which a waiting head may no longer be overtaken", low=0, high=1e9
    )
    max_preemptions: int = setting(
        2, "preemptions after which a sequence is protected", low=0, high=1000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8000, "port to bind; 0 = any free one", low=0, high=65_535)
    max_body_bytes: int = setting(8 << 20, "largest request body", low=1024, high=1 << 32)
    max_n: int = setting(64, "most choices of one request", low=1, high=1024)
    max_logprobs: int = setting(20, "most alternatives reported for a token", low=0, high=100)
    request_timeout_s: float = setting(
        600.0, "longest a request may take, queueing included", low=0.1, high=1e6
    )
    drain_timeout_s: float = setting(
        30.0, "longest wait for running requests at shutdown", low=0, high=1e5
    )
    stream_buffer_bytes: int = setting(
        1 << 20, "unsent stream bytes after which a slow reader is cut", low=1024, high=1 << 30
    )
    special_tokens_in_content: bool = setting(
        False, "special tokens that a chat message spells become these tokens, and no text"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    policy: str = setting(
        "kv",
        "how a worker is chosen; kv = the least predicted milliseconds, cached prefixes included",
        choices=(
            "kv",
            "prefix",
            "session",
            "least_loaded",
            "power_of_two",
            "round_robin",
            "random",
        ),
        flag="--router-policy",
    )
    seed: int = setting(
        0, "of what the router draws", low=0, high=(1 << 63) - 1, flag="--router-seed"
    )
    expected_output_tokens: int = setting(
        128,
        "output that the router expects of a sequence, at most max_tokens",
        low=0,
        high=1_000_000,
        flag="--router-output-tokens",
    )
    prefill_weight: float = setting(
        2.0,
        "what a millisecond of own prefill counts beside one of queueing, as it delays others",
        low=0,
        high=1000,
        flag="--router-prefill-weight",
    )
    interference_weight: float = setting(
        1.0,
        "what a millisecond of slower decoding counts beside one of TTFT",
        low=0,
        high=1000,
        flag="--router-interference-weight",
    )
    kv_link: str = setting(
        "",
        "link over which workers fetch each other's KV, as the cost model calls it; empty = memory"
        " on one machine, tcp between machines",
        flag="--router-kv-link",
    )
    kv_network_gb_s: float = setting(
        0.0,
        "GB/s that KV has between machines; 0 = what the cost model says of tcp: 1",
        low=0,
        high=1e4,
        flag="--router-kv-network-gb-s",
    )
    fetch_kv: bool = setting(
        True,
        "fetch prefixes that other workers have cached where that is predicted to be sooner",
        flag="--router-fetch-kv",
    )
    worker_queue_ms: float = setting(
        5000.0,
        "predicted prefill at a worker beyond which requests wait in the router",
        low=0,
        high=1e9,
        flag="--router-worker-queue-ms",
    )
    max_waiting_requests: int = setting(
        4096,
        "requests that wait in the router; beyond it they are refused with 429",
        low=0,
        high=10_000_000,
        flag="--router-max-waiting",
    )
    worker_wait_s: float = setting(
        10.0,
        "how long a request waits for a first worker to come up, before 503",
        low=0,
        high=1e6,
        flag="--router-worker-wait-s",
    )
    refuse_late: bool = setting(
        False,
        "refuse a request whose TTFT, predicted by the router, misses its SLO",
        flag="--router-refuse-late",
    )
    stats_stale_ms: float = setting(
        2000.0,
        "age at which what a worker told about its load counts no more, and it is taken for busy",
        low=1,
        high=1e9,
        flag="--router-stats-stale-ms",
    )
    index_ttl_s: float = setting(
        120.0,
        "how long a prefix is taken to be cached by a worker that publishes no KV events",
        low=0.1,
        high=1e6,
        flag="--router-index-ttl-s",
    )
    breaker_failures: int = setting(
        3,
        "failures of a worker within half a minute or so that cut it off",
        low=1,
        high=1000,
        flag="--router-breaker-failures",
    )
    breaker_open_s: float = setting(
        5.0,
        "time until a worker that was cut off is probed; doubled each time that it fails then",
        low=0.01,
        high=1e5,
        flag="--router-breaker-open-s",
    )
    breaker_probes: int = setting(
        2,
        "probes that must succeed before such a worker is trusted again",
        low=1,
        high=1000,
        flag="--router-breaker-probes",
    )
    kept_decisions: int = setting(
        1024,
        "decisions that can be asked for afterwards",
        low=0,
        high=1_000_000,
        flag="--router-kept-decisions",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What decides the behaviour of an EngineCore."""

    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KvConfig = KvConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    kv: KvConfig = KvConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cluster: ClusterConfig = ClusterConfig()  # noqa: RUF009 - it is frozen
    server: ServerConfig = ServerConfig()
    router: RouterConfig = RouterConfig()
    autoscaler: AutoscalerConfig = AutoscalerConfig()  # noqa: RUF009 - it is frozen
    telemetry: TelemetryConfig = TelemetryConfig()  # noqa: RUF009 - it is frozen

    @property
    def worker(self) -> WorkerConfig:
        return WorkerConfig(scheduler=self.scheduler, kv=self.kv)
