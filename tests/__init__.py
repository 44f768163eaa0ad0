"""Tests, a folder per room."""
