"""Runners: other processes that play episodes. Only the run's own process, the head, writes the journal."""
