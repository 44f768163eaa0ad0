"""OpenPipe ART, both ways: training at its server, and serving its clients."""
