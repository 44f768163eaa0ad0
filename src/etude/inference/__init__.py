"""Engines and the recording client."""
