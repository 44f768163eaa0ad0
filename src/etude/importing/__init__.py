"""Taking over the configs of other harnesses."""
