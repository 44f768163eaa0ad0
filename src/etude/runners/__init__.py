"""Runners: other processes that play episodes. The run's own process, the head, alone writes the journal."""
