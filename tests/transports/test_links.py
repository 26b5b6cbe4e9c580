from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_p2p.errors import BlockUnavailableError, Obstacle, TransferError
from dask_p2p.transports.links import BlockRef, Links

DTYPE = np.dtype("f4")


class FakeTransport:
    def __init__(self, name, obstacles):
        self.name = name
        self.obstacles = obstacles  # by (holder, kind)
        self.fails = {}  # by holder: what a probe raises
        self.probed = []
        self.forgotten = []

    def obstacle(self, holder, kind, dtype):
        assert dtype == DTYPE
        return self.obstacles.get((holder, kind))

    def probe(self, holder, kind):
        self.probed.append((holder, kind))
        if holder in self.fails:
            raise self.fails[holder]

    def forget(self, holder):
        self.forgotten.append(holder)


@pytest.fixture
def said():
    return []


@pytest.fixture
def ipc():
    return FakeTransport("ipc", {("a", "numpy"): "no GPU", ("far", "cupy"): "another host"})


@pytest.fixture
def links(ipc, said):
    return Links({"ipc": ipc, "comm": FakeTransport("comm", {})}, said.append)


def found(links, holders, kind="cupy", order=("ipc", "comm")):
    return links.ways(BlockRef("k", holders), kind, DTYPE, order)


def ways(links, holders, kind="cupy", order=("ipc", "comm")):
    return [(way.holder, way.transport.name) for way in found(links, holders, kind, order)]


def test_best_first_holder_by_holder(links):
    assert ways(links, ("a", "b")) == [("a", "ipc"), ("a", "comm"), ("b", "ipc"), ("b", "comm")]


def test_obstacles_and_order(links):
    assert ways(links, ("a",), "numpy") == [("a", "comm")]
    assert ways(links, ("far",)) == [("far", "comm")]
    assert ways(links, ("a",), order=("comm",)) == [("a", "comm")]


def test_what_is_quicker_by_far_comes_first_where_the_same_order_is_given(links):
    links.prefer("a", ("ipc", "comm"), "comm")
    assert ways(links, ("a",)) == [("a", "comm"), ("a", "ipc")]
    assert ways(links, ("b",)) == [("b", "ipc"), ("b", "comm")]
    assert ways(links, ("a",), order=("ipc",)) == [("a", "ipc")]
    links.report_failure(found(links, ("a",))[0], TransferError("broken"), last=False)
    assert ways(links, ("a",)) == [("a", "ipc")]
    links.forget("a")
    assert ways(links, ("a",)) == [("a", "ipc"), ("a", "comm")]


def test_a_preference_can_be_taken_back(links):
    links.prefer("a", ("ipc", "comm"), "comm")
    links.prefer("a", ("ipc", "comm"), None)
    assert ways(links, ("a",)) == [("a", "ipc"), ("a", "comm")]


def test_a_failure_is_reported_once_and_kept_to_its_holder(links, said):
    error = TransferError("ipc: a could not send block k: why", reason="why")
    links.report_failure(found(links, ("a",))[0], error, last=False)
    assert said == ["dask_p2p: ipc fails, another transport is used instead: why"]
    assert links.failure("a", "ipc") == Obstacle("failed", str(error))
    assert ways(links, ("a", "b")) == [("a", "comm"), ("b", "ipc"), ("b", "comm")]
    links.report_failure(found(links, ("b",))[0], TransferError("of b", reason="why"), last=False)
    assert len(said) == 1
    assert ways(links, ("b",)) == [("b", "comm")]
    links.forget("a")
    assert links.failure("a", "ipc") is None
    assert ways(links, ("a",)) == [("a", "ipc"), ("a", "comm")]


def test_the_last_way_is_always_tried_again(links, said):
    for name in ("ipc", "comm"):
        way = next(w for w in found(links, ("a",), order=(name,)) if w.holder == "a")
        links.report_failure(way, TransferError("why"), last=name == "comm")
    assert ways(links, ("a",)) == [("a", "comm")]
    assert links.failure("a", "comm") is None
    assert said == ["dask_p2p: ipc fails, another transport is used instead: why"]
    assert ways(links, ("a",), order=("ipc",)) == [("a", "ipc")], "there is nothing else"


def test_a_way_is_proved_once_for_each_holder_and_kind(links, ipc):
    for _ in range(3):
        ways(links, ("a", "b"))
    assert ipc.probed == [("a", "cupy"), ("b", "cupy")]
    ways(links, ("b",), "numpy")
    assert ipc.probed == [("a", "cupy"), ("b", "cupy"), ("b", "numpy")]
    links.forget("b")
    ways(links, ("a", "b"))
    assert ipc.probed[3:] == [("b", "cupy")]
    assert ipc.forgotten == ["b"]


def test_nothing_is_kept_of_workers_that_left(links):
    for i in range(100):
        way, _ = found(links, (f"worker {i}",))
        links.report_failure(way, TransferError("why"), last=False)
    ways(links, ("stays",))
    for i in range(100):
        links.forget(f"worker {i}")
    assert set(links._proving) == links._proved == {("stays", "ipc", "cupy")}
    assert links._broken == {}


@pytest.mark.parametrize("name", ["_proved", "_proving"])
def test_a_worker_leaves_while_another_is_met(links, ipc, name):
    """What is learnt of one is noted just when what was learnt of the other is looked for."""
    kind = type(getattr(links, name))
    meeting = threading.Thread(target=ways, args=(links, ("new",)))
    probing, go_on = threading.Event(), threading.Event()

    def probe(holder, kind):
        probing.set()
        assert go_on.wait(10)

    class Watched(kind):
        def __iter__(self):
            for proof in super().__iter__():
                if meeting.ident is None:
                    meeting.start()
                go_on.set()
                meeting.join(0.2)
                yield proof

    ways(links, ("gone", "stays"))
    watched = Watched() if kind is set else Watched(threading.Lock)
    watched.update(getattr(links, name))
    setattr(links, name, watched)
    ipc.probe = probe
    if name == "_proved":  # of which it is about to make a note
        meeting.start()
        assert probing.wait(10)
    links.forget("gone")
    meeting.join(10)
    assert {holder for holder, *_ in links._proved} == {"stays", "new"}
    assert {holder for holder, *_ in links._proving} == {"stays", "new"}


def test_threads_that_need_a_way_at_once_prove_it_once(links, ipc):
    started, go_on = threading.Event(), threading.Event()
    original = ipc.probe

    def probe(holder, kind):
        original(holder, kind)
        started.set()
        assert go_on.wait(10)

    ipc.probe = probe
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(ways(links, ("a",)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert results == [[("a", "ipc"), ("a", "comm")]] * 3
    assert ipc.probed == [("a", "cupy")]


def test_a_way_that_fails_its_proof_is_not_used(links, ipc, said):
    ipc.fails["a"] = TransferError("it came changed")
    assert ways(links, ("a", "b")) == [("a", "comm"), ("b", "ipc"), ("b", "comm")]
    assert said == ["dask_p2p: ipc fails, another transport is used instead: it came changed"]
    ways(links, ("a",))
    assert ipc.probed == [("a", "cupy"), ("b", "cupy")]


def test_what_is_not_used_is_not_proved(ipc, said):
    ucx = FakeTransport("ucx", {})
    comm = FakeTransport("comm", {})
    links = Links({"ipc": ipc, "ucx": ucx, "comm": comm}, said.append)
    order = ("ipc", "ucx", "comm")
    assert [name for _, name in ways(links, ("a",), order=order)] == [*order]
    assert ucx.probed == comm.probed == []
    ipc.fails["b"] = TransferError("it came changed")
    assert [name for _, name in ways(links, ("b",), order=order)] == ["ucx", "comm"]
    assert ucx.probed == [("b", "cupy")]
    assert comm.probed == []


def test_a_holder_that_does_not_answer_proves_nothing(links, ipc, said):
    ipc.fails["a"] = BlockUnavailableError("no answer")
    assert ways(links, ("a",)) == [("a", "ipc"), ("a", "comm")]
    assert said == []
    del ipc.fails["a"]
    ways(links, ("a",))
    assert ipc.probed == [("a", "cupy"), ("a", "cupy")]
