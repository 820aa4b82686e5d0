"""EngineCore: scheduler, KV manager and hand-off behind one `handle`."""
