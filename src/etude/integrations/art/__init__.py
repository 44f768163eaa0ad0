"""OpenPipe ART in both directions: training on an ART server, and serving ART's clients."""
