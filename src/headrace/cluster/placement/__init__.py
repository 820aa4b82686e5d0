"""Workers on machines that somebody else hands out: which place each life of a worker gets, and how
it is told from a stranger when it comes to the door.

Decides where a worker begins and what its end is called; refuses to carry requests, tokens or KV.
"""
