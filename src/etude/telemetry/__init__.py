"""A run on its own account while it goes on: its status for other terminals, and metrics for Prometheus."""
