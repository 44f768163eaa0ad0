"""Engines, and the clients that they sample with."""
