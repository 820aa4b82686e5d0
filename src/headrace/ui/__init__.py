"""Web pages over one JSON feed, so that a live and a simulated cluster look the same.

Refuses to know where the figures come from."""
