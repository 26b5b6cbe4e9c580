"""Coroutines that no other coroutine awaits."""

from __future__ import annotations

import asyncio
import gc

from dask_p2p.interprocess.background import Background


async def test_errors_are_not_reported_to_the_loop():
    background, reported = Background(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, of: reported.append(of))

    async def fail():
        raise OSError("the scheduler is gone")

    background.start(fail())
    while background._running:
        await asyncio.sleep(0)
    gc.collect()
    assert not reported


async def test_cancel():
    background, event = Background(), asyncio.Event()
    background.start(event.wait())
    await asyncio.sleep(0)
    background.cancel()
    while background._running:
        await asyncio.sleep(0)
    assert not event.is_set()
