"""Progress as log records, which is how the toolkit's commands tell what they do."""

from __future__ import annotations

import io
import logging

from etude.report.lines import LineProgress

logger = logging.getLogger("etude.integrations.nat")


class LogStream(io.StringIO):
    """A text stream whose lines become log records."""

    def write(self, text: str) -> int:
        """Log the lines of a text; what ends a line is not one."""
        for line in text.splitlines():
            if line.strip():
                logger.info("%s", line)
        return len(text)


def logged_progress() -> LineProgress:
    """Plain lines, as log records of the level INFO."""
    return LineProgress(LogStream())
