"""Between text and tokens: tokenizers, incremental detokenisation, stop strings, chat templates.

Decides which tokens a text is and which text a token completes; refuses to know where the tokens
come from.
"""
