"""What a RouterCore tells about itself between events: a query that changes nothing."""

import msgspec


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    num_workers: int
    num_open_breakers: int
    num_unsynced_workers: int  # whose cache changes were lost, until a snapshot comes
    num_waiting: int
    num_in_flight: int
    num_replicas: int  # stored blocks in the index, each as often as workers have it
    num_dispatched: int
    num_rejected: int
    num_resyncs: int
    num_queried_blocks: int  # of dispatched requests
    num_hit_blocks: int  # of these, predicted to be cached where they went
