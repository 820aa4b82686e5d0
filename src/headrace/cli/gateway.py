"""`headrace serve --engine URL`: a router over engines that run elsewhere; no model is loaded."""

from headrace.cli.output import print_facts, print_json, report_note
from headrace.cli.report import drain_line
from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import Config
from headrace.server.listener import bind


def serve_engines(config: Config, *, as_json: bool) -> int:
    """Bind, then route until a signal. ConfigError where the settings ask for an engine of our own
    too, or the client's library is not installed.
    """
    if config.model.path or config.cluster.num_workers > 1:
        raise ConfigError(
            "engines that run elsewhere are served, or a model here, but not both",
            hint="leave out the model and --workers, or leave out --engine",
        )
    try:
        from headrace.cluster.gateway.run import run_gateway
    except ImportError as error:
        raise ConfigError(
            f"the client for engines is not installed: {error}",
            hint="pip install '.[gateway]' in headrace's checkout",
        ) from error

    def tell(url: str, engines: dict[str, str]) -> None:
        if as_json:
            print_json({"url": url, "engines": engines, "policy": config.router.policy})
        else:
            print_facts(
                {
                    "engines": engines,
                    "router": {"policy": config.router.policy},
                    "address": {"URL": f"{url}/v1  (Ctrl-C drains and stops)"},
                }
            )

    def note_drain(num_requests: int) -> None:
        report_note(drain_line(num_requests, config.server.drain_timeout_s))

    run_gateway(
        config,
        listener=bind(config.server.host, config.server.port),
        on_ready=tell,
        on_drain=note_drain,
    )
    return 0
