"""Tests of `etude.inference`."""
