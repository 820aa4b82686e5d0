"""AutoscalerCore: how many workers of which role there are."""
