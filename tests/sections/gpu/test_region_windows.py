"""Small regions between GPUs through windows: values, and the order of all accesses of memory."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest

from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import ORDERS, RankGrid
from dask_p2p.sections.gpu import regions as region_windows
from dask_p2p.sections.gpu import windows
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory, PeerWindow
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import Connections
from tests.sections.gangs import connections_of
from tests.sections.gpu.test_regions import (
    PAIR,
    SLABS,
    fail_on_rank,
    filled,
    in_pieces,
    overwritten,
    run,
)
from tests.sections.gpu.test_regions import there_and_back as both_ways
from tests.simulation.streams import RaceError
from tests.support import pairwise, tune


@pytest.fixture
def calls(monkeypatch):
    """By rank: the last word of each exchange of messages."""
    found, begin = {}, Connections.begin

    def noted(connections, call, *args):
        rank, _ = connections.rank_and_size
        found.setdefault(rank, []).append(call.rpartition(" ")[2])
        return begin(connections, call, *args)

    monkeypatch.setattr(Connections, "begin", noted)
    return found


@pytest.mark.parametrize(
    ("ranks", "exchange"),
    pairwise([PAIR, SLABS, RankGrid(((20, 28), (16, 24)), (2, 2))], ORDERS),
)
def test_values(gpu, in_place, ranks, exchange):
    run(gpu, ranks, partial(both_ways, gpu, times=3, exchange=exchange))
    assert not in_place


def test_one_rank_has_no_window(gpu, in_place):
    run(gpu, RankGrid(((48,), (40,)), (1, 1)), partial(both_ways, gpu))
    assert in_place


def test_an_exchange_takes_one_message(gpu, calls):
    def twice(ctx, own):
        a = filled(gpu, own)
        b = ctx.redistribute(a, (1,))
        calls[ctx.rank].clear()
        ctx.redistribute(a, (1,), out=b)
        assert calls[ctx.rank] == ["packed"]

    run(gpu, PAIR, twice)


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces(gpu, in_place, axis):
    run(gpu, SLABS, partial(in_pieces, gpu, SLABS, axis=axis))
    assert not in_place


def test_windows_grow_and_serve_smaller_calls(gpu, monkeypatch):
    monkeypatch.setattr(region_windows, "_LEAST_SLOT_BYTES", 1)
    sizes_bytes, original = [], PeerWindow.__init__

    def noted(own, gpu, descriptor, size_bytes):
        sizes_bytes.append(size_bytes)
        original(own, gpu, descriptor, size_bytes)

    def columns(ctx, side):
        whole = np.arange(side * side, dtype="f8").reshape(side, side)
        given = filled(gpu, whole[box_slices(ctx.box_of((0,), whole.shape))])
        b = ctx.redistribute(given, (1,), (0,), shape=whole.shape)
        overwritten(gpu, given, -1)
        assert np.array_equal(b.get(), whole[box_slices(ctx.box_of((1,), whole.shape))])

    def several(ctx, own):
        for side in (4, 8, 4, 6, 16, 16, 4):
            columns(ctx, side)

    monkeypatch.setattr(PeerWindow, "__init__", noted)
    run(gpu, PAIR, several)
    assert sorted({*sizes_bytes}) == [32, 128, 512]
    assert len(sizes_bytes) == 6


def test_larger_blocks_are_read_in_place(gpu, in_place, monkeypatch):
    tune(monkeypatch, window_bytes=40 * 28 * 8)  # of the second rank
    run(gpu, PAIR, lambda ctx, own: ctx.redistribute(filled(gpu, own), (1,)))
    assert not in_place
    tune(monkeypatch, window_bytes=40 * 28 * 8 - 1)
    run(gpu, PAIR, lambda ctx, own: ctx.redistribute(filled(gpu, own), (1,)))
    assert len(in_place) == 2


@pytest.mark.parametrize("what", [OwnEvents, PeerMemory])
def test_a_rank_that_shares_no_memory(gpu, in_place, monkeypatch, what):
    """No rank uses windows then: all of them agree."""
    fail_on_rank(monkeypatch, what, "__init__", 2)
    run(gpu, SLABS, partial(both_ways, gpu))
    assert len({*in_place}) == 4


def test_ranks_of_several_hosts(gpu, in_place, monkeypatch):
    monkeypatch.setattr(
        Connections, "is_on_other_host", lambda own, rank: rank // 2 != own.rank_and_size[0] // 2
    )
    run(gpu, SLABS, partial(both_ways, gpu))
    assert len({*in_place}) == 4


def test_bytes_are_counted(gpu):
    def counted(ctx, own):
        ctx.redistribute(filled(gpu, own), (1,))
        ((_, before, _),) = connections_of(ctx).received
        shape = ctx.redistribute(filled(gpu, own), (1,)).shape
        ((_, after, _),) = connections_of(ctx).received
        assert after - before == (48 - len(own)) * shape[1] * 8

    run(gpu, PAIR, counted)


def test_a_rank_that_has_gone_ends_the_attempt(gpu, monkeypatch):
    """Work of the others ends before memory is freed."""
    original, count = Connections.begin, iter(range(100))

    def dies(connections, call, *args):
        if call.endswith("packed") and connections.rank_and_size[0] == 1 and next(count) == 1:
            raise OSError("killed")
        return original(connections, call, *args)

    monkeypatch.setattr(Connections, "begin", dies)
    with pytest.raises((OSError, AttemptEndedError)):
        run(gpu, SLABS, partial(both_ways, gpu))
    gc.collect()
    gpu.check()


# --- without one of the rules


def no_wait_for_others(monkeypatch):
    monkeypatch.setattr(PeerMemory, "wait", lambda peer, stream, number: None)


def recorded_before_the_copies(monkeypatch):
    make = OwnEvents.__init__

    def early(own, device, count):
        make(own, device, count)
        for event in own.events:
            record, other = event.record, device.copies
            event.record = lambda stream, record=record, other=other: record(other)

    monkeypatch.setattr(OwnEvents, "__init__", early)


def one_slot(monkeypatch):
    memory, address = windows.OwnWindow.memory, PeerWindow.address
    monkeypatch.setattr(windows.OwnWindow, "memory", lambda own, rank, slot: memory(own, rank, 0))
    monkeypatch.setattr(PeerWindow, "address", lambda peer, slot: address(peer, 0))


@pytest.mark.parametrize("breaks", [no_wait_for_others, recorded_before_the_copies, one_slot])
def test_each_rule_is_needed(gpu, monkeypatch, breaks):
    breaks(monkeypatch)
    with pytest.raises(RaceError):
        run(gpu, PAIR, partial(both_ways, gpu, times=3))
