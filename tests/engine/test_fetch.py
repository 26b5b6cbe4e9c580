from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.engine.remote import Fetch, RemoteSource
from dask_p2p.errors import TransferError
from dask_p2p.monitoring.records import Stage
from dask_p2p.plans import Piece
from dask_p2p.transports import Route
from dask_p2p.transports.base import Reading, Region, Request
from dask_p2p.transports.buffers import Footprint

BOX = ((0, 2), (0, 4))


class FakeReading(Reading):
    def __iter__(self):
        return (part.on_its_way(lambda *_: np.ones((2, 4), "f4")) for part in self.parts())

    def close(self):
        self.is_closed = True


def source(transport, *holders):
    """Of eight elements, with a route to each holder."""
    pieces = [Piece(0, BOX, ((0, 4), (0, 2)))]
    routes = [Route(holder, transport) for holder in holders]
    return RemoteSource(0, ("x", 0, 0), holders[0], pieces, routes)


def begun(in_place=False, begun_s=5.0, start_s=4.5, dtype="f4"):
    """Of two sources."""
    transport = SimpleNamespace(name="ipc" if in_place else "cma", in_place=in_place)
    sources = [source(transport, "b"), source(transport, "b")]
    request = Request(("x", 0, 0), "b", (2, 4), np.dtype(dtype), "numpy", [BOX])
    reading = FakeReading([request, request], Footprint(None, 1), options())
    return Fetch(sources, reading, options(), start_s, begun_s)


def record_written(fetch, *sources):
    for number in sources:
        fetch.record_written(Region(number, 0, BOX))


def test_a_stage_of_messages():
    fetch = begun()
    record_written(fetch, 0, 1)
    fetch.waited_s, fetch.last_s = 0.25, 5.75
    fetch.kernels.groups, fetch.kernels.timed, fetch.kernels.timed_s = 4, 2, 0.0625
    assert fetch.stage() == Stage("b", "cma", 2 * 8 * 4, 0.25, 0.75, 0.5, 0.125)


def test_a_stage_has_what_came_and_no_more():
    """A block that failed goes by its next route, perhaps from another holder."""
    fetch = begun()
    record_written(fetch, 0, 1)
    failed = fetch.sources[0]
    failed.give_up(TransferError("broken"))
    failed.routes = [Route("c", fetch.route.transport)]
    stage = fetch.stage()
    assert (stage.holder, stage.nbytes) == ("b", 8 * 4)
    assert failed.wasted == 8


def test_what_has_come_so_far():
    start_s = time.perf_counter() - 1.5
    fetch = begun(begun_s=start_s + 0.5, start_s=start_s)
    fetch.last_s = fetch.begun_s + 0.25
    record_written(fetch, 0)
    stage = fetch.progress()
    assert (stage.holder, stage.transport, stage.nbytes, stage.begun_s) == ("b", "cma", 32, 0.5)
    assert stage.wire_s >= 1, "the second is still on its way"
    record_written(fetch, 1)
    stage = fetch.progress()
    assert (stage.nbytes, stage.wire_s) == (64, pytest.approx(0.25))
    fetch.sources[0].fetch = object()  # it failed, and comes otherwise
    assert fetch.progress().nbytes == 32


def test_waiting_is_timed_also_where_it_fails():
    fetch = begun(begun_s=time.perf_counter())

    def late(limit_s, destination):
        time.sleep(0.01)
        raise KeyError(1)

    with pytest.raises(KeyError):
        fetch.wait_for(Region(0, 0, BOX, late))
    assert 0.01 <= fetch.waited_s <= fetch.last_s - fetch.begun_s
    assert fetch.wait_for(Region(0, 0, BOX, lambda *_: 7)) == 7
    assert 0.01 <= fetch.waited_s <= fetch.last_s - fetch.begun_s


@pytest.mark.parametrize(
    ("failure", "given_up", "left"),
    [
        ({"scope": "region"}, 1, ["ipc of b", "cma of c"]),
        ({}, 1, ["ipc of b", "cma of c"]),
        ({"is_silence": True}, 2, ["ipc of b", "cma of c"]),
        ({"scope": "block"}, 1, ["cma of c"]),
        ({"scope": "holder", "is_silence": True}, 2, ["cma of c"]),
    ],
)
def test_what_a_failure_means_to_other_blocks_and_routes(failure, given_up, left):
    fetch = begun()
    first, _ = fetch.sources
    cma, ipc = fetch.route.transport, SimpleNamespace(name="ipc", in_place=True)
    first.routes += [Route("b", ipc), Route("c", cma)]
    fetch.give_up(next(fetch.regions()), TransferError("why", **failure))
    assert sum(source.error is not None for source in fetch.sources) == given_up
    assert hasattr(fetch.reading, "is_closed") == (given_up == 2)
    first.leave_route()
    assert [f"{route.transport.name} of {route.holder}" for route in first.routes] == left
    assert first.causes == ["cma: why"]
