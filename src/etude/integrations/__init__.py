"""Guests, each behind its extra. They register themselves; nothing below knows them."""
