"""Telemetry of an active run: its status for other terminals, and metrics for Prometheus."""
