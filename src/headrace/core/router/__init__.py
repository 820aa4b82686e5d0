"""RouterCore: which worker gets a request, in predicted milliseconds, explained."""
