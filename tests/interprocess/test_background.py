"""Coroutines that no other coroutine awaits."""

from __future__ import annotations

import asyncio
import gc
import weakref

from dask_p2p.transports.rpc import Background


async def test_coroutines_are_kept_until_they_end():
    """Only the coroutine refers to the future that it awaits."""
    background, futures, finished = Background(), [], []

    async def work():
        future = asyncio.get_running_loop().create_future()
        futures.append(weakref.ref(future))
        await future
        finished.append(True)

    background.start(work())
    await asyncio.sleep(0)
    gc.collect()
    futures[0]().set_result(None)
    while background._running:
        await asyncio.sleep(0)
    assert finished == [True]


async def test_cancel():
    background, event = Background(), asyncio.Event()
    background.start(event.wait())
    await asyncio.sleep(0)
    background.cancel()
    while background._running:
        await asyncio.sleep(0)
    assert not event.is_set()
