"""Movers carry KV blocks between places: memory, disk, remote stores, tcp.

Refuses to choose which block moves."""
