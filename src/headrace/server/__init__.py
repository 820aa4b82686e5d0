"""The ASGI application: OpenAI dialect, SSE, limits and /metrics.

Decides what a client's bytes mean and what is sent back; refuses to know how tokens are computed or
scheduled.
"""
