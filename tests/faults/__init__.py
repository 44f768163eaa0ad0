"""A model's endpoint that misbehaves in every way that is known."""
