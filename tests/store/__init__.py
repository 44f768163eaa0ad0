"""Tests of `etude.store`."""
