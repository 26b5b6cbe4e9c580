from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from dask_p2p.monitoring.records import Stage
from dask_p2p.plans import Piece
from dask_p2p.reads import OpenRead, RemoteSource
from dask_p2p.transports.router import BlockRef, Route


def source(transport, *holders):
    """Of eight elements, with a route to each holder."""
    pieces = [Piece(0, ((0, 2), (0, 4)), ((0, 4), (0, 2)))]
    routes = [Route(holder, transport) for holder in holders]
    return RemoteSource(0, BlockRef(("x", 0, 0), holders), pieces, routes)


def open_read(in_place=False, begun_s=5.0, **values):
    transport = SimpleNamespace(name="ipc" if in_place else "cma", in_place=in_place)
    sources = [source(transport, "b"), source(transport, "b")]
    return OpenRead(transport, sources, None, 0, begun_s, begun_s, **values)


def test_a_stage_of_messages():
    read = open_read(waited_s=0.25)
    read.last_s = 5.75
    read.kernels.groups, read.kernels.timed, read.kernels.timed_s = 4, 2, 0.0625
    stage = read.stage(read.sources, 4, 4.5)
    assert stage == Stage("b", "cma", 2 * 8 * 4, 0.25, 0.75, 0.5, 0.125)


@pytest.mark.parametrize(("copied_s", "wire_s"), [(0.5, 0.5), (0.0, None)])
def test_a_stage_in_which_copy_engines_or_kernels_read(copied_s, wire_s):
    read = open_read(in_place=True)
    read.copies.groups = 1
    read.copies.add(copied_s)
    assert read.stage(read.sources, 8, 5.0).wire_s == wire_s


def test_a_stage_has_what_came_and_no_more():
    """A block that failed goes by its next route, perhaps from another holder."""
    read = open_read()
    read.sources[0].routes = [Route("c", read.transport)]
    stage = read.stage(read.sources[1:], 4, 5.0)
    assert (stage.holder, stage.nbytes) == ("b", 8 * 4)


def test_what_has_come_so_far():
    read = open_read(begun_s=time.perf_counter() - 1)
    read.last_s = read.begun_s + 0.25
    first, second = read.sources
    first.wanted = second.wanted = second.missing = 8
    stage = read.so_far(4, read.begun_s - 0.5)
    assert (stage.holder, stage.transport, stage.nbytes, stage.begun_s) == ("b", "cma", 32, 0.5)
    assert stage.wire_s >= 1, "the second is still on its way"
    second.missing = 0
    stage = read.so_far(4, read.begun_s - 0.5)
    assert (stage.nbytes, stage.wire_s) == (64, pytest.approx(0.25))
    first.reading = object()  # it failed, and comes otherwise
    assert read.so_far(4, 0.0).nbytes == 32


def test_waiting_is_timed_also_where_it_fails():
    read = open_read(begun_s=time.perf_counter())
    assert read.timed(lambda: time.sleep(0.01) or 7) == 7
    with pytest.raises(KeyError):
        read.timed({}.__getitem__, 1)
    assert 0.01 <= read.waited_s <= read.last_s - read.begun_s
