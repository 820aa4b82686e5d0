"""Pure folds of events and effects into latencies, goodput and the cause of every SLO miss."""
