"""What the epoch trainer remembers, measures and decides."""
