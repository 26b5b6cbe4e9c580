from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.engine.remote import Fetch, RemoteSource
from dask_p2p.errors import TransferError
from dask_p2p.geometry import box_size
from dask_p2p.plans import Piece
from dask_p2p.transports.base import Reading, Request
from dask_p2p.transports.buffers import Footprint
from dask_p2p.transports.router import Route

BOX = ((0, 2), (0, 4))


class FakeReading(Reading):
    def __iter__(self):
        return (part.mark_requested(lambda *_: np.ones((2, 4), "f4")) for part in self.parts())

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
    reading = FakeReading([request, request], Footprint(None, 1))
    return Fetch(sources, reading, options(), start_s, begun_s)


@pytest.mark.parametrize(
    ("failure", "given_up", "routes_left"),
    [
        ({"scope": "region"}, 1, ["ipc of b", "cma of c"]),
        ({}, 1, ["ipc of b", "cma of c"]),
        ({"is_silence": True}, 2, ["ipc of b", "cma of c"]),
        ({"scope": "block"}, 1, ["cma of c"]),
        ({"scope": "holder", "is_silence": True}, 2, ["cma of c"]),
    ],
)
def test_what_a_failure_means_to_other_blocks_and_routes(failure, given_up, routes_left):
    fetch = begun()
    first, _ = fetch.sources
    cma, ipc = fetch.route.transport, SimpleNamespace(name="ipc", in_place=True)
    first.routes += [Route("b", ipc), Route("c", cma)]
    fetch.give_up(next(fetch.regions()), TransferError("why", **failure))
    assert sum(source.error is not None for source in fetch.sources) == given_up
    assert hasattr(fetch.reading, "is_closed") == (given_up == 2)
    first.leave_route()
    assert [f"{route.transport.name} of {route.holder}" for route in first.routes] == routes_left
    assert first.causes == ["cma: why"]


def test_a_block_that_has_arrived_is_kept_where_its_holder_falls_silent():
    fetch = begun()
    for source, box in zip(fetch.sources, (((0, 1), (0, 3)), BOX), strict=True):
        source.missing -= box_size(box)
    fetch.give_up(next(fetch.regions()), TransferError("why", is_silence=True))
    assert [source.error is None for source in fetch.sources] == [False, True]
    assert [source.wasted for source in fetch.sources] == [3, 0], "elements to read again"
