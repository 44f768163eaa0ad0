"""Imports the modules that register what code validation has: its scenario, data sets and evaluators."""

from __future__ import annotations

from etude.scenarios import datasets, evaluators, scenario

__all__ = ["datasets", "evaluators", "scenario"]
