"""Alarms: checks that look in the metrics of epochs and validations for signs that a run goes wrong."""
