"""Tests of `etude.rollout`."""
