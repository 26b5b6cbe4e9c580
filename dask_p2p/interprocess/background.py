"""Coroutines that run on the event loop, and that no other coroutine awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """The running coroutines of one object: the event loop has only weak references to them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[Any]) -> None:
        """Run a coroutine; ignore its result and its errors. On the event loop."""
        running = asyncio.ensure_future(work)
        self._running.add(running)
        running.add_done_callback(self._finished)

    def cancel(self) -> None:
        """Cancel all that run. On the event loop."""
        for running in self._running:
            running.cancel()

    def _finished(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.debug("a coroutine in the background has failed", exc_info=error)
