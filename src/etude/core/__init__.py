"""The values that everyone passes around: no I/O, no torch."""
