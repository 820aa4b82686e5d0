"""The schema's section on which processes there are, and where."""

from dataclasses import dataclass

from headrace.core.config.field import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    workers: int = setting(
        0,
        "worker processes that do all work; 0 or 1, with no others = the engine runs in the server",
        low=0,
        high=256,
    )
    prefill: int = setting(
        0, "worker processes that compute prompts and hand their KV on", low=0, high=256
    )
    decode: int = setting(
        0, "worker processes that decode what others have computed", low=0, high=256
    )
    handoff: str = setting(
        "auto",
        "prompts that go to a prefill worker; auto = where that is predicted to cost less",
        choices=("auto", "always", "never"),
    )
    handoff_ms: float = setting(
        5.0, "what a hand-off is taken to cost beside the copying", low=0, high=1e6
    )
    handoff_neighbour_weight: float = setting(
        0.1,
        "what a millisecond by which a prompt delays each sequence that decodes beside it counts"
        " beside one of its own",
        low=0,
        high=1000,
    )

    max_migrations: int = setting(
        3, "workers that a request may lose before it ends with an error", low=0, high=100
    )
    silence_timeout_s: float = setting(
        5.0,
        "silence after which a worker is taken for lost; six times as long while it loads",
        low=1,
        high=3600,
    )
    stall_timeout_s: float = setting(
        0.75,
        "silence after which others go on with the prompts that a worker computes for them, and"
        " with what it was handed and has not begun",
        low=0.5,
        high=3600,
    )
    restart_delay_s: float = setting(
        0.5,
        "wait before a worker that lived less than 10 s starts again; doubled each time, to 64 x",
        low=0,
        high=3600,
    )
    canary: bool = setting(
        True,
        "ask each worker a small request of known answer when it starts and when it is quiet, and"
        " give it requests only where the answer is that of the others",
    )
    canary_every_s: float = setting(
        60.0,
        "how long a worker may compute nothing before it is asked again; 0 = only when it starts",
        low=0,
        high=1e6,
    )
    canary_timeout_s: float = setting(
        60.0,
        "how long a worker that was asked may compute nothing before it is taken for hung",
        low=0.1,
        high=3600,
    )
    listen: str = setting("", "HOST:PORT where workers of other machines come in; empty = none may")
    secret_file: str = setting("", "file with the secret that all machines of a cluster share")
    on: str = setting(
        "",
        "where workers run: empty = on this machine; ray = on the Ray cluster that it is a node of;"
        " ray://HOST:PORT = on the cluster with this head",
    )
    on_cpus: float = setting(
        0.0,
        "CPUs that each worker asks of the cluster it runs on; 0 = device.threads, or else 1",
        low=0,
        high=1024,
    )
    on_timeout_s: float = setting(
        30.0, "how long a cluster may take to find a place for a worker", low=1, high=86_400
    )
    engines: tuple[str, ...] = setting(
        (),
        "OpenAI-compatible server to route to, as URL or NAME=URL, with `,kv-events=tcp://HOST:PORT`"
        " where it publishes those; again for each further one",
        flag="--engine",
    )
    engine_keys: str = setting(
        "", "file with the API keys of engines, `NAME KEY` on each line; `*` names all others"
    )
    engine_tokenizer: str = setting(
        "",
        "folder or GGUF file with the engines' tokenizer, to find prompts among their KV events",
    )
    engine_poll_s: float = setting(
        0.5, "time between two looks at an engine's health and load", low=0.01, high=3600
    )
    engine_first_byte_s: float = setting(
        60.0,
        "how long an engine may take to the first byte of an answer before another one is asked",
        low=0.01,
        high=1e6,
    )
    engine_prefill_tokens_per_s: float = setting(
        10_000.0,
        "how fast an engine is taken to compute a prompt, by which its queue is predicted",
        low=1,
        high=1e9,
    )

    @property
    def num_workers(self) -> int:
        """Processes that the front end starts."""
        return self.workers + self.prefill + self.decode

    @property
    def is_alone(self) -> bool:
        """Whether one engine does everything, so that no other process is needed."""
        return not (self.workers > 1 or self.prefill or self.decode or self.listen or self.on)
