from __future__ import annotations

from tests.rollout.conftest import journal

__all__ = ["journal"]
