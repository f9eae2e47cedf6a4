"""Warnings that are said once."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before."""
    _log.warning(message)
