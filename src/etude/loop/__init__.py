"""The loop over epochs: collect, train, adopt, validate, and never lose work."""
