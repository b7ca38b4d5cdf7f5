"""Logging to standard error, from the main process only."""

from __future__ import annotations

import logging
import sys


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
