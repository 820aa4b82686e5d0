"""The way of tokens from a server to whoever reads them, as far as records know of it."""

import msgspec

from headrace.core.base.metrics import tpot_ns
from headrace.core.base.types import Ns
from headrace.core.cost.calibration import Host
from headrace.core.telemetry import RequestRecord
from headrace.core.telemetry.parts import TimeParts

NO_HOST = Host()


def read_by_client(record: RequestRecord, host: Host) -> RequestRecord:
    """The same with the way of its tokens to the client, which counts as waiting for the router."""
    if record.ttft_ns is None or host == NO_HOST:
        return record
    first_ns, last_ns = round(host.first_token_ns), round(host.token_ns)
    ttft, e2e = Ns(record.ttft_ns + first_ns), Ns(record.e2e_ns + last_ns)
    return msgspec.structs.replace(
        record,
        finished_ns=Ns(record.finished_ns + last_ns),
        ttft_ns=ttft,
        e2e_ns=e2e,
        tpot_ns=tpot_ns(e2e, ttft, record.num_output_tokens),
        time=_on_the_way(record.time, last_ns),
        ttft_time=None if record.ttft_time is None else _on_the_way(record.ttft_time, first_ns),
    ).judged()


def _on_the_way(time: TimeParts, way_ns: int) -> TimeParts:
    return msgspec.structs.replace(time, router_wait_ns=Ns(time.router_wait_ns + way_ns))
