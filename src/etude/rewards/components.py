"""Imports the modules that register the shipped evaluators."""

from __future__ import annotations

from etude.rewards import function_evaluator, group_judge, llm_judge, weighted

__all__ = ["function_evaluator", "group_judge", "llm_judge", "weighted"]
