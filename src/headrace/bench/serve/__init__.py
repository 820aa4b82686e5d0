"""`headrace bench serve`: realistic traffic for any OpenAI-compatible server, and what came of it.

Decides when requests are sent, which answers count and how sure the figures are; refuses to know
which server answers."""
