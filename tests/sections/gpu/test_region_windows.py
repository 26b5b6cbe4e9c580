"""Small regions between GPUs through windows: values, and the order of all accesses of memory."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

from dask_p2p.geometry import box_slices
from dask_p2p.sections.gpu import regions as region_windows
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory, PeerWindow
from dask_p2p.sections.wire.connections import Connections
from tests.sections.gpu.test_regions import PAIR, SLABS, fail_on_rank, filled, overwritten, run
from tests.sections.gpu.test_regions import there_and_back as both_ways
from tests.support import noted, tune


def test_an_exchange_takes_one_message(gpu, monkeypatch):
    calls = noted(monkeypatch, Connections, "begin", lambda _, call, *args: call.split()[-1])
    counts = []
    for times in (1, 2):
        calls.clear()
        run(gpu, PAIR, partial(both_ways, gpu, times=times))
        counts.append(Counter(calls))
    assert counts[1] - counts[0] == {"packed": 2 * 2}, "of two ranks, there and back"


def test_windows_grow_and_serve_smaller_calls(gpu, monkeypatch):
    monkeypatch.setattr(region_windows, "_LEAST_SLOT_BYTES", 1)
    sizes_bytes = noted(monkeypatch, PeerWindow, "__init__", lambda *args: args[-1])

    def columns(ctx, side):
        global_array = np.arange(side * side, dtype="f8").reshape(side, side)
        local_block = filled(gpu, global_array[box_slices(ctx.box_of((0,), global_array.shape))])
        b = ctx.redistribute(local_block, (1,), (0,), shape=global_array.shape)
        overwritten(gpu, local_block, -1)
        assert np.array_equal(
            b.get(), global_array[box_slices(ctx.box_of((1,), global_array.shape))]
        )

    def several(ctx, local_block):
        for side in (4, 8, 4, 6, 16, 16, 4):
            columns(ctx, side)

    run(gpu, PAIR, several)
    assert sorted({*sizes_bytes}) == [32, 128, 512]
    assert len(sizes_bytes) == 6


def test_larger_blocks_are_read_in_place(gpu, in_place, monkeypatch):
    tune(monkeypatch, window_bytes=40 * 28 * 8)  # of the second rank
    run(gpu, PAIR, lambda ctx, local_block: ctx.redistribute(filled(gpu, local_block), (1,)))
    assert not in_place
    tune(monkeypatch, window_bytes=40 * 28 * 8 - 1)
    run(gpu, PAIR, lambda ctx, local_block: ctx.redistribute(filled(gpu, local_block), (1,)))
    assert len(in_place) == 2


@pytest.mark.parametrize("obstacle", [OwnEvents, PeerMemory])
def test_a_rank_that_shares_no_memory(gpu, in_place, monkeypatch, obstacle):
    """No rank uses windows then: all of them agree."""
    fail_on_rank(monkeypatch, obstacle, "__init__", 2)
    run(gpu, SLABS, partial(both_ways, gpu))
    assert len({*in_place}) == 4
