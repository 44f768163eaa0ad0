"""Alarms: what is wrong with a run, seen in the metrics of its epochs and validations."""
