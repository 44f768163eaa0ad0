"""A run's spending: models, amounts and limits."""
