"""What fulfils the core's effects: executors run steps, movers move KV.

Decides nothing; refuses to know policies."""
