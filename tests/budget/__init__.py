"""Tests of `etude.budget`."""
