"""Which block holds what: allocation, prefix sharing, eviction. Refuses to know the bytes."""
