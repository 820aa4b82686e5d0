"""Arrival processes and traces as data: who asks what, when. Seeded, clockless."""
