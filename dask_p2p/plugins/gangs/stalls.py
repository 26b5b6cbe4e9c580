"""A file for each gang that stalls: the calls, waits and stacks of all ranks, as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import tempfile
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import dask

logger = logging.getLogger(__name__)

#: Request of the scheduler to workers.
REPORTS = "p2p_section_reports"
_REPLY_S = 30.0
_NAME_CHARS = 60


class Stalls:
    """Writes the file when the first rank of a gang has waited for long."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._writing: dict[str, asyncio.Future[None]] = {}  # by gang, also when it is done

    def record(self, gang: str, workers: Collection[str]) -> None:
        """Write the file of a gang on some workers, unless that has begun already."""
        if gang not in self._writing:
            self._writing[gang] = asyncio.ensure_future(self._write(gang, sorted(workers)))

    def forget(self, gang: str) -> None:
        """Forget a gang."""
        self._writing.pop(gang, None)

    def close(self) -> None:
        """Stop writing."""
        for writing in self._writing.values():
            writing.cancel()

    async def _write(self, gang: str, workers: Collection[str]) -> None:
        found = await asyncio.gather(*(self._reports(gang, worker) for worker in workers))
        reports = sorted((each for own in found if own for each in own), key=lambda of: of["rank"])
        silent = [worker for worker, own in zip(workers, found, strict=True) if own is None]
        content = {
            "gang": gang,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "ranks": reports,
            "workers_without_reply": silent,
        }
        try:
            path = await asyncio.to_thread(_written, gang, content)
        except OSError as exc:
            logger.warning("Could not write the calls and stacks of %s: %s", gang, exc)
            return
        logger.warning(
            "Ranks of %s have waited for others for long. On the scheduler's host %s has the "
            "calls and stacks of all %d ranks.",
            *(gang, path, len(reports)),
        )

    async def _reports(self, gang: str, worker: str) -> list[dict[str, Any]] | None:
        """Return the reports of a worker's ranks; None if it does not reply."""
        with suppress(OSError, TimeoutError):
            call = getattr(self._scheduler.rpc(worker), REPORTS)(gang=gang)
            reply = await asyncio.wait_for(call, _REPLY_S)
            reports: list[dict[str, Any]] | None = reply.get("reports")
            return reports
        return None


def _written(gang: str, content: dict[str, Any]) -> str:
    """Write the file into Dask's temporary directory; return its path."""
    name = re.sub(r"[^\w-]", "_", gang)[:_NAME_CHARS]
    folder = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    number, path = tempfile.mkstemp(".json", f"{name}-stalled-", folder)  # it is a new file
    with open(number, "w") as file:
        json.dump(content, file, indent=1)
    return path
