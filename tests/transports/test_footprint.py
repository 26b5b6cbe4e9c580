"""Arithmetic of parts: what is configured where that fits, and never more than the limit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends import MOST_UNREAD, SLOTS
from dask_p2p.config import options
from dask_p2p.transports import OWN, CmaTransport, CommTransport, IpcTransport, UcxTransport
from dask_p2p.transports.buffers import (
    ByteBudget,
    buffer_bytes,
    idle_bytes,
    packed_bytes,
    staging_bytes,
)
from dask_p2p.transports.pinned import PinnedTransport

comm_footprint, ucx_footprint = CommTransport.footprint, UcxTransport.footprint


KIB, MIB, GIB = 2**10, 2**20, 2**30
KINDS = ("numpy", "cupy")


@given(
    limit_bytes=st.integers(16 * KIB, 4 * GIB),
    part_bytes=st.integers(1, 8 * GIB),
    order=st.sampled_from([None, *((transport.name, "comm") for transport in OWN)]),
    kind=st.sampled_from(KINDS),
)
def test_what_a_task_holds_is_within_the_limit(limit_bytes, part_bytes, order, kind):
    chosen = replace(
        options(),
        staging_limit_bytes=limit_bytes,
        transports=order,
        part_bytes=part_bytes,
        ipc_staging_bytes=part_bytes,
    )
    unread = MOST_UNREAD if kind == "cupy" else 0
    slots = SLOTS * (IpcTransport.footprint(chosen, "cupy").part_bytes or 0)
    if kind != "cupy" or "ipc" not in chosen.order(kind):
        slots = 0
    comm, ucx = comm_footprint(chosen, kind), ucx_footprint(chosen, kind)
    on_device = 1 + unread if kind == "cupy" else 0
    assert slots + (comm.parts_in_flight + 1 + on_device) * comm.part_bytes <= limit_bytes
    assert slots + (ucx.parts_in_flight + 1 + unread) * buffer_bytes(ucx.part_bytes) <= limit_bytes
    pinned = PinnedTransport.footprint(chosen, kind)
    parts_held = pinned.parts_in_flight + 1 + (unread + 2 if kind == "cupy" else 0)
    assert slots + parts_held * buffer_bytes(pinned.part_bytes) <= limit_bytes
    cma = CmaTransport.footprint(chosen, "numpy")
    assert buffer_bytes(cma.part_bytes) <= limit_bytes
    assert cma.part_bytes <= min(part_bytes, GIB)
    assert comm.part_bytes <= part_bytes
    assert ucx.part_bytes <= part_bytes
    for largest_bytes in (0, 100 * KIB, 100 * GIB):
        held_bytes = staging_bytes(chosen, kind, largest_bytes, 100 * GIB, 8)
        assert held_bytes <= limit_bytes
    assert packed_bytes(chosen, kind, 100, 100 * GIB) <= limit_bytes
    for transport in OWN:
        assert transport.footprint(chosen, kind).idle_bytes(chosen) <= limit_bytes
    assert idle_bytes(replace(chosen, transports=("comm",)), kind) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_one_byte_leaves_parts_of_one(kind):
    chosen = replace(options(), staging_limit_bytes=1)
    assert comm_footprint(chosen, kind).part_bytes == 1
    ucx = ucx_footprint(chosen, kind)
    assert (ucx.part_bytes, ucx.parts_in_flight) == (512, 0), "one after another"
    ipc = IpcTransport.footprint(chosen, "cupy")
    assert ipc.part_bytes is None, "kernels read the other GPU's memory in place"


def test_two_that_look_at_the_same_time():
    both_look = threading.Barrier(2)

    class Watched(ByteBudget):
        @property
        def reserved_bytes(self):
            found_bytes = super().reserved_bytes
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.2)
            return found_bytes

    budget = Watched(100)
    with ThreadPoolExecutor(2) as threads:
        reservations = [threads.submit(budget.reserve, 60) for _ in range(2)]
    assert sorted(bool(future.result()) for future in reservations) == [False, True]
