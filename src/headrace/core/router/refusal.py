"""Why a request gets no worker, and what would help: what can never run is refused at once, and
what would come too late as soon as that is predicted.
"""

from enum import Enum

from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.router.events import RouteReject, RouteRequest
from headrace.core.router.fleet import ADAPTER, MODEL, ROLE, TOO_LONG, Fleet, Survey
from headrace.core.router.pricing import Pricing
from headrace.core.router.waiting import WaitingRoom


class Noun(Enum):
    """What those that requests go to are called where clients hear of them: one, and many."""

    WORKER = ("a worker", "workers")
    ENGINE = ("an engine", "engines")

    @property
    def bare(self) -> str:
        return self.value[0].partition(" ")[2]


def find_fault(
    request: RouteRequest, survey: Survey, fleet: Fleet, noun: Noun
) -> RouteReject | None:
    """Refuse what no worker of the role that is up could ever take. None where one may, or where
    none of the role is up: one may come.
    """
    lasting = (MODEL, ADAPTER, TOO_LONG)
    num_lasting = sum(len(survey.filtered.get(reason, ())) for reason in lasting)
    num_of_role = len(fleet) - len(survey.filtered.get(ROLE, ()))
    if not num_of_role or num_lasting < num_of_role:
        return None
    asked = f"prompt of {request.num_tokens} tokens and max_tokens of {request.max_tokens}"
    if TOO_LONG in survey.filtered:
        most = max(worker.most_tokens for worker in fleet)
        is_short = most < max(worker.spec.max_model_len for worker in fleet)
        return RouteReject(
            request.request_id,
            400,
            "kv_pool_too_small" if is_short else "context_length_exceeded",
            f"{asked} exceed the {most} tokens of {'a KV pool' if is_short else 'the model'}",
            "shorten the prompt, lower max_tokens"
            + (", or serve with a larger --kv-memory" if is_short else ""),
        )
    if ADAPTER in survey.filtered:
        return RouteReject(
            request.request_id, 404, "adapter_not_found", f"no {noun.bare} has {request.adapter}"
        )
    return RouteReject(
        request.request_id, 404, "model_not_found", f"no {noun.bare} has {request.model_digest}"
    )


def lateness(
    now: Ns,
    request: RouteRequest,
    survey: Survey,
    pricing: Pricing,
    fleet: Fleet,
    room: WaitingRoom,
) -> RouteReject | None:
    """Refuse a request whose predicted TTFT misses its limit, and say when to come back."""
    limit_ms = request.slo.ttft_ms
    if limit_ms is None or not len(fleet):
        return None
    # With no room anywhere, the workers that are full are what there is.
    workers = survey.usable or list(fleet)
    best_ns = min(pricing.first_token_ns(worker) for worker in workers)
    waiting_ns = room.prefill_ns / len(fleet)
    ttft_ms = (now - request.arrived_ns + waiting_ns + best_ns) / NS_PER_MS
    if ttft_ms <= limit_ms:
        return None
    return RouteReject(
        request.request_id,
        503,
        "ttft_unattainable",
        f"predicted time to first token is {ttft_ms:.0f} ms, the limit is {limit_ms:.10g} ms",
        "retry later, or allow more time to the first token",
        retry_after_s=max(0.1, (ttft_ms - limit_ms) * NS_PER_MS / NS_PER_S),
    )


def too_late(request_id: int, noun: Noun) -> RouteReject:
    return RouteReject(
        request_id,
        504,
        "deadline_exceeded",
        f"the request's time was over before {noun.value[0]} had room",
        f"allow more time, or add {noun.value[1]}",
    )


def queue_full(request_id: int, num_waiting: int, retry_after_s: float, noun: Noun) -> RouteReject:
    return RouteReject(
        request_id,
        429,
        "queue_full",
        f"{num_waiting} requests wait for {noun.value[0]}, which is the limit",
        "retry later",
        retry_after_s=retry_after_s,
    )


def no_worker(request_id: int, waited_s: float, noun: Noun) -> RouteReject:
    return RouteReject(
        request_id,
        503,
        "no_worker",
        f"no {noun.bare} came up within {waited_s:g} s",
        "retry later",
        retry_after_s=max(1.0, waited_s),
    )
