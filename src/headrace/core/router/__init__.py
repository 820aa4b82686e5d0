"""RouterCore: which worker gets a request, in predicted milliseconds, explained.

Decides who computes what for whom, and who waits; refuses to know how a request or an answer is
carried.
"""
