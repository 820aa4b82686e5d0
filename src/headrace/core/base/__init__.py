"""Words every machine shares: ids, time, errors, sampling parameters, step plans."""
