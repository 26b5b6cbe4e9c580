from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_p2p.errors import TransferError
from dask_p2p.transports.links import BlockRef, Links


@pytest.fixture
def links():
    def transport(name, obstacles):
        return SimpleNamespace(
            name=name,
            obstacle=lambda holder, kind: obstacles.get((holder, kind)),
            forget=lambda holder: None,
        )

    return Links(
        {
            "ipc": transport("ipc", {("a", "numpy"): "no GPU", ("far", "cupy"): "another host"}),
            "comm": transport("comm", {}),
        }
    )


def ways(links, holders, kind="cupy", order=("ipc", "comm")):
    return [(w.holder, w.transport.name) for w in links.ways(BlockRef("k", holders), kind, order)]


def test_best_first_holder_by_holder(links):
    assert ways(links, ("a", "b")) == [("a", "ipc"), ("a", "comm"), ("b", "ipc"), ("b", "comm")]


def test_obstacles_and_order(links):
    assert ways(links, ("a",), "numpy") == [("a", "comm")]
    assert ways(links, ("far",)) == [("far", "comm")]
    assert ways(links, ("a",), order=("comm",)) == [("a", "comm")]


def test_a_failure_is_reported_once_and_kept_to_its_holder(links):
    way = links.ways(BlockRef("k", ("a",)), "cupy", ("ipc", "comm"))[0]
    error = TransferError("ipc: a could not send block k: why", reason="why")
    said = links.report_failure(way, error, last=False)
    assert said == "dask_p2p: ipc fails, another transport is used instead: why"
    assert links.report_failure(way, TransferError("why"), last=False) is None
    assert ways(links, ("a", "b")) == [("a", "comm"), ("b", "ipc"), ("b", "comm")]
    other = links.ways(BlockRef("k", ("b",)), "cupy", ("ipc", "comm"))[0]
    assert links.report_failure(other, TransferError("of b", reason="why"), last=False) is None
    assert ways(links, ("b",)) == [("b", "comm")]
    links.forget("a")
    assert ways(links, ("a",)) == [("a", "ipc"), ("a", "comm")]


def test_the_last_way_is_always_tried_again(links):
    for name in ("ipc", "comm"):
        way = next(w for w in links.ways(BlockRef("k", ("a",)), "cupy", (name,)) if w.holder == "a")
        links.report_failure(way, TransferError("why"), last=name == "comm")
    assert ways(links, ("a",)) == [("a", "comm")]
