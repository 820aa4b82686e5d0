"""Argument parsing into configuration, and tables out of answers: serve, chat, generate, pull,
doctor, explain, replay.

Decides nothing about serving; refuses to know how a step is planned or a block is found.
"""
