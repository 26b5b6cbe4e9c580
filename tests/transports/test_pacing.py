"""Arithmetic of parts: what is configured where that fits, and never more than the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.config import TRANSPORTS, options
from dask_p2p.kernels.queue import MOST_UNREAD, SLOTS
from dask_p2p.transports.buffers import buffer_bytes
from dask_p2p.transports.pacing import (
    Pacing,
    cma_pacing,
    comm_pacing,
    idle_bytes,
    ipc_pacing,
    packed_bytes,
    pinned_pacing,
    staging_bytes,
    ucx_pacing,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
KINDS = ("numpy", "cupy")


def test_defaults_are_not_cut():
    chosen = options()
    assert ipc_pacing(chosen).part_bytes == 128 * MIB
    assert ucx_pacing(chosen, "cupy").part_bytes == 256 * MIB
    assert ucx_pacing(chosen, "numpy").part_bytes == 16 * MIB
    assert pinned_pacing(chosen, "cupy") == Pacing(32 * MIB, 3)
    assert comm_pacing(chosen, "cupy").part_bytes == 16 * MIB
    assert comm_pacing(chosen, "numpy").part_bytes == 16 * MIB
    assert cma_pacing(chosen) == Pacing(2 * MIB, 0), "one after another"


@given(
    limit_bytes=st.integers(16 * KIB, 4 * GIB),
    part_bytes=st.integers(1, 8 * GIB),
    in_flight=st.integers(1, 4),
    order=st.sampled_from(
        [None, *((name, "comm") for name in ("ipc", "ucx", "pinned", "cma")), ("comm",)]
    ),
    kind=st.sampled_from(KINDS),
)
def test_what_a_task_holds_is_within_the_limit(limit_bytes, part_bytes, in_flight, order, kind):
    chosen = replace(
        options(),
        staging_limit_bytes=limit_bytes,
        transports=order,
        comm_part_bytes=part_bytes,
        ucx_part_bytes=part_bytes,
        ucx_host_part_bytes=part_bytes,
        ipc_staging_bytes=part_bytes,
        cma_part_bytes=part_bytes,
        pinned_part_bytes=part_bytes,
        comm_parts_in_flight=in_flight,
        ucx_parts_in_flight=in_flight,
    )
    unread = MOST_UNREAD if kind == "cupy" else 0
    slots = SLOTS * (ipc_pacing(chosen).part_bytes or 0)
    if kind != "cupy" or "ipc" not in chosen.order(kind):
        slots = 0
    comm, ucx = comm_pacing(chosen, kind), ucx_pacing(chosen, kind)
    on_device = 1 + unread if kind == "cupy" else 0
    assert slots + (in_flight + 1 + on_device) * comm.part_bytes <= limit_bytes
    in_flight = ucx.parts_in_flight
    assert slots + (in_flight + 1 + unread) * buffer_bytes(ucx.part_bytes) <= limit_bytes
    pinned = pinned_pacing(chosen, kind)
    held = pinned.parts_in_flight + 1 + (unread + 2 if kind == "cupy" else 0)
    assert slots + held * buffer_bytes(pinned.part_bytes) <= limit_bytes
    assert buffer_bytes(cma_pacing(chosen).part_bytes) <= limit_bytes
    assert cma_pacing(chosen).part_bytes <= min(part_bytes, GIB)
    assert comm.part_bytes <= part_bytes
    assert ucx.part_bytes <= part_bytes
    for largest_bytes in (0, 100 * KIB, 100 * GIB):
        held_bytes = staging_bytes(chosen, kind, largest_bytes, 100 * GIB, 8)
        assert held_bytes <= limit_bytes
    assert packed_bytes(chosen, kind, 100, 100 * GIB) <= limit_bytes
    for transport in TRANSPORTS:
        assert idle_bytes(transport, chosen, kind) <= limit_bytes


@pytest.mark.parametrize(
    ("largest_bytes", "in_flight"),
    [(100 * GIB, 2), (16 * MIB, 2), (8 * MIB + 1, 2), (8 * MIB, 4), (MIB, 16), (1, 16), (0, 16)],
)
def test_of_small_parts_more_are_on_their_way_but_no_more_bytes(largest_bytes, in_flight):
    assert Pacing(16 * MIB, 2).for_regions(largest_bytes) == Pacing(16 * MIB, in_flight)


@pytest.mark.parametrize("pacing", [Pacing(2 * MIB, 0), Pacing(None, 0), Pacing(MIB, 40)])
def test_small_parts_that_go_one_at_a_time_still_do(pacing):
    assert pacing.for_regions(100) == pacing


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_one_byte_leaves_parts_of_one(kind):
    chosen = replace(options(), staging_limit_bytes=1)
    assert comm_pacing(chosen, kind).part_bytes == 1
    assert ucx_pacing(chosen, kind) == Pacing(512, 0), "one after another"
    assert ipc_pacing(chosen).part_bytes is None, "kernels read the other GPU's memory in place"


def test_what_is_staged_is_not_more_than_what_comes():
    chosen = options()
    assert staging_bytes(chosen, "numpy", 0, 0, 8) == 0
    assert staging_bytes(chosen, "numpy", 1000, 1500, 8) == 1500
    assert staging_bytes(chosen, "numpy", 1000, 100_000, 8) == 100_000
    assert staging_bytes(chosen, "numpy", 16 * MIB, GIB, 8) == 48 * MIB
    assert packed_bytes(chosen, "numpy", 3, 1000) == 1000
    assert packed_bytes(chosen, "numpy", 0, 1000) == 0
