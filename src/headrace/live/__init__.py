"""The driver of the machines under the real clock: threads, inbox, event log.

Decides when an event is handed to a machine; refuses to decide anything a machine decides."""
