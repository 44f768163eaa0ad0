"""What all tests start from."""

from __future__ import annotations

import signal

# Whoever starts a program in the background may have it ignore Ctrl-C, and its children inherit that:
# tests that press Ctrl-C on a child would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
