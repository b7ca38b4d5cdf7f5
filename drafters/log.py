"""Logging to standard error, from the main process only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def setup(main_process: bool = True) -> None:
    """Shows this package's messages from level INFO on; other processes show errors only."""
    logger = logging.getLogger("drafters")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if main_process else logging.ERROR)


def run_main(main: Callable[[], int | None]) -> None:
    """Ends the process with main's exit status (0 for None); what a user can mend is one message and status 2."""
    setup()
    try:
        status = main() or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)
