"""What functions raise: all see it by name, and no worker ends for it."""

from __future__ import annotations

import asyncio
import os
import threading

import dask.array as da
import pytest
from distributed import Reschedule

from dask_p2p import spmd
from dask_p2p.errors import SectionError
from tests.sections.support import nothing_is_left


class CannotBeMadeAgainError(Exception):
    def __init__(self, first, second):
        super().__init__("cannot be pickled")
        self.lock = threading.Lock()


class SaysNothingError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


WHAT = {
    "StopIteration: at rank 1": lambda: StopIteration("at rank 1"),
    "Reschedule: ": Reschedule,
    "SystemExit: 3": lambda: SystemExit(3),
    "KeyboardInterrupt: ": KeyboardInterrupt,
    "GeneratorExit: ": GeneratorExit,
    "CancelledError: by nobody": lambda: asyncio.CancelledError("by nobody"),
    "CannotBeMadeAgainError: cannot be pickled": lambda: CannotBeMadeAgainError(1, 2),
    "SaysNothingError: ": SaysNothingError,
    "ValueError: xxxxxxxxxx": lambda: ValueError("x" * 2_000_000),
}


def raising(ctx, x, what):
    if ctx.rank == ctx.size - 1:
        raise WHAT[what]()
    ctx.barrier()
    return x


@pytest.mark.parametrize("what", WHAT)
def test_all_see_by_name_what_one_raises(client, what):
    workers = {*client.run(os.getpid).values()}
    x = da.ones((4, 2), chunks=(1, 2))
    with pytest.raises(SectionError, match=rf"the function raised {what}.* on member 3"):
        spmd(raising, x, members=4, what=what).compute()
    nothing_is_left(client)
    assert {*client.run(os.getpid).values()} == workers


def test_one_member_alone_ends_no_worker_either():
    x = da.ones((4, 2), chunks=(1, 2))
    with pytest.raises(SectionError, match="the function raised SystemExit: 3 on member 0"):
        spmd(raising, x, members=1, what="SystemExit: 3").compute(scheduler="sync")
    with pytest.raises(ValueError, match="xxx"):
        spmd(raising, x, members=1, what="ValueError: xxxxxxxxxx").compute(scheduler="sync")
