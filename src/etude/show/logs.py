"""Python's `logging` in Etude's processes: records of user code are shown next to the progress."""

import logging
import sys
from pathlib import Path

from etude.config.import_path import is_installed, is_user_module

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGE = str(Path(__file__).parents[1])


class LogLines(logging.Handler):
    """A handler that writes records to standard error, a line each, with the time.

    Records of user code and of Etude are shown from the level `shown` on. Records of other packages are shown
    from warnings on, unless somebody gave their logger a level.
    """

    def __init__(self, shown: int) -> None:
        super().__init__()
        # The handler's own level would also hide records of loggers with a lower level.
        self._least = shown

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show the record."""
        file = record.pathname
        # The record comes from user code or from Etude.
        is_own = file.startswith(_PACKAGE) or not is_installed(file) or is_user_module(record.name)
        least = self._least if is_own else max(self._least, logging.WARNING)
        logger = logging.getLogger(record.name)
        while logger.level == logging.NOTSET and logger.parent is not None:
            logger = logger.parent
        has_level = logger.parent is not None  # Only the root has none.
        return super().filter(record) is not False and (record.levelno >= least or has_level)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record. Standard error may have been replaced since the handler was made."""
        try:
            date_format = "%H:%M:%S" if sys.stderr.isatty() else None
            line = logging.Formatter(_FORMAT, date_format).format(record)
            print(line, file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  as logging's own handlers do: a line that cannot be written ends no run
            self.handleError(record)


def show_logs(level: int) -> None:
    """Show log records of this process from now on. A second call changes the level."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, LogLines)]:
        root.removeHandler(handler)
    root.addHandler(LogLines(level))
    root.setLevel(level)
