"""The idle end of a resident gang: without commands, its handles are stored, and its ranks end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from dask_p2p import tuning
from dask_p2p.fusing.resident.command_log import KEEP, STORE
from dask_p2p.fusing.resident.stored_handles import Sizes, StoredHandles, registered

if TYPE_CHECKING:
    from dask_p2p.fusing.resident.client_streams import ClientStreams

_PREFIX = "p2p-suspended"  # of the names of stored handles


async def suspend_when_idle(streams: ClientStreams, end_s: float) -> None:
    """Suspend a gang that has had no command for some time."""
    while True:
        while (left_s := end_s - streams.idle_s) > 0:
            await asyncio.sleep(left_s)
        if await _is_suspended(streams):
            return
        await asyncio.sleep(tuning.current.suspend_pause_s)


async def _is_suspended(streams: ClientStreams) -> bool:
    """Store the handles of a gang, and suspend it unless a command has come in between."""
    name = f"{_PREFIX}-{uuid4().hex}"
    number, answers = await streams.ask(KEEP)
    sizes: Sequence[Sizes] = answers
    with suppress(KeyError):  # a worker is lost
        futures = await registered(streams.client, name, sizes, streams.ranks)
        last, _ = await streams.ask(STORE, number, name)
        return streams.suspend(StoredHandles(name, number, futures), last)
    return False
