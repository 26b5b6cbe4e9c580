"""Assemblies with transports that do what a test says: order, overlap, failures, leases."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.config import options
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.fetch import BlockRef
from dask_p2p.engine.local_context import LocalContext
from dask_p2p.errors import (
    BlockMismatchError,
    BlockUnavailableError,
    TransferError,
    UnreachableError,
    UnsupportedArrayError,
)
from dask_p2p.geometry import box_slices
from dask_p2p.plans import redistribution, slab_chunks
from dask_p2p.transports.base import Reading, Transport
from dask_p2p.transports.footprint import Footprint
from dask_p2p.transports.router import Router
from tests.simulation.gpu import DeviceArray
from tests.support import tune

CHUNKS = ((3, 3, 3), (9,))
X = np.arange(81.0).reshape(9, 9)
BLOCKS = {("x", i, 0): X[3 * i : 3 * i + 3] for i in range(3)}
PLAN = redistribution(CHUNKS, (1, 0), slab_chunks(CHUNKS, (1, 0)))
OPTIONS = replace(options(), transports=("quick", "slow"))


class FakeTransport(Transport):
    """Records its requests, and fails for the blocks that a test chose.

    `fails` maps (holder, key) to an exception, raised when the block is opened, or with
    ``late`` when the second of its regions is waited for.
    """

    in_place = False

    def __init__(self, name, log, part_bytes=None, ahead=1):
        super().__init__(None, options())
        self.name = name
        self.log = log
        self.fails = {}
        self.late = set()
        self.open_now = []
        self.hosts = {}  # by worker
        self.part_bytes, self.ahead = part_bytes, ahead

    def handlers(self):
        return {}

    def obstacle(self, holder, kind, dtype):
        return "far away" if holder == "far" and self.name == "quick" else None

    def boot_id(self, worker):
        return self.hosts.get(worker)

    def probe(self, holder, kind):
        pass

    def footprint(self, options, kind):
        return Footprint(self.part_bytes, self.ahead)

    def read(self, requests, options):
        self.requests = requests
        return FakeReading(self, requests, self.footprint(options, "numpy"), options)

    async def close(self):
        pass


def _result(future, timeout_s, into):
    return future.result(timeout_s)


class FakeReading(Reading):
    """Notes when each block is opened, and when each region of it is asked for."""

    def __init__(self, transport, requests, flow, options):
        super().__init__(requests, flow, options)
        self.transport = transport
        self.asked = Counter()
        transport.open_now.append(self)

    def __iter__(self):
        for part in self.parts():
            request = self.requests[part.request]
            error = self.transport.fails.get((request.holder, request.key))
            if not self.asked[request.key]:
                opening = ("open", self.transport.name, request.holder, request.key)
                self.transport.log.append(opening)
                if error is not None and request.key not in self.transport.late:
                    self.drop(part.request)
                    yield part.failed(error)
                    continue
            future = self.request(request, part.box, error)
            bring = partial(_result, future)
            yield part.on_its_way(bring, future.done)
            del bring
            del future

    def request(self, request, box, error):
        self.transport.log.append(("request", request.key))
        self.asked[request.key] += 1
        future = Future()
        if error is not None and self.asked[request.key] == 2:
            future.set_exception(error)
        else:
            future.set_result(BLOCKS[request.key][box_slices(box)].copy())
        return future

    def close(self):
        if self in self.transport.open_now:
            self.transport.open_now.remove(self)


class FakePeers:
    address = "b"
    memory = None

    def __init__(self, *transports):
        self.warnings = []
        self.served = []
        self.warn = self.warnings.append
        self.router = Router({t.name: t for t in transports}, self.warn)

    def publish(self, blocks, kind, options):
        self.served += blocks

    def empty_output(self, shape, dtype, queue):
        return queue.empty(shape, dtype)

    def memory_below(self, wanted_bytes, kind):
        limit_bytes = self.memory
        return None if limit_bytes is None or wanted_bytes <= limit_bytes else limit_bytes


@pytest.fixture
def log():
    return []


@pytest.fixture
def quick(log):
    return FakeTransport("quick", log)


@pytest.fixture
def slow(log):
    return FakeTransport("slow", log)


@pytest.fixture
def peers(quick, slow):
    return FakePeers(quick, slow)


def assembly(peers, holders=("a", "b", "c"), here="b", index=(1, 0), **changes):
    """Output block 1; source block i is held by holders[i]."""
    plan = PLAN.block(index)
    output = OutputSpec(("x",), X.dtype, "numpy", replace(OPTIONS, **changes))
    blocks = [
        BLOCKS["x", *source]
        if holder == here
        else BlockRef(("x", *source), holder if isinstance(holder, tuple) else (holder,))
        for source, holder in zip(plan.sources, holders, strict=True)
    ]
    return Assembly(plan, output, blocks, peers)


def opened(log):
    return [entry[1:3] for entry in log if entry[0] == "open"]


def check(result):
    np.testing.assert_array_equal(result, X.T[3:6])


def test_stage_order_and_leases(peers, quick, log):
    made = assembly(peers)
    check(made.run())
    assert opened(log) == [("quick", "c"), ("quick", "a")]  # b, then around: c, a
    assert quick.open_now == []
    assert [(s.holder, s.transport, s.nbytes) for s in made.sources.stages] == [
        ("c", "quick", 72),
        ("a", "quick", 72),
    ]
    assert peers.served == [("x", 1, 0)]


def test_a_transport_gets_the_axis_that_comes_last_in_the_output(peers, quick):
    check(assembly(peers).run())
    assert [request.fast_axis for request in quick.requests] == [0]


def test_holders_of_the_own_host_come_first(quick, peers, log):
    quick.hosts = {"a": "1", "b": "1", "c": "2"}
    check(assembly(peers).run())
    assert [holder for _, holder in opened(log)] == ["a", "c"]


def test_replicas_of_the_own_host_are_read(quick, peers, log):
    quick.hosts = {"a": "2", "b": "1", "c": "2", "d": "1"}
    check(assembly(peers, ("a", "b", ("a", "c", "d"))).run())
    assert [holder for _, holder in opened(log)] == ["d", "a"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_own_host_is_read_while_others_are_waited_for(
    quick, slow, peers, log, monkeypatch, mode
):
    """The far region comes only when the last near one has been asked for."""
    quick.within_host, quick.part_bytes = True, 24
    request, far = FakeReading.request, []

    def asked(self, of, *args):
        future = request(self, of, *args)
        if self.transport is slow:
            far.append((Future(), future))
            return far[-1][0]
        if self.asked[of.key] == 3 and mode == "async":
            for future_far, real in far:
                future_far.set_result(real.result())
        return future

    monkeypatch.setattr(FakeReading, "request", asked)
    tune(monkeypatch, event_loop_grace_s=0.0)
    timeout_s = 1.0 if mode == "sync" else 60.0
    made = assembly(peers, ("far", "b", "c"), mode=mode, request_timeout_s=timeout_s)
    if mode == "sync":
        with pytest.raises(TransferError, match="no answer from far"):
            made.run()
        kinds = [entry[1] for entry in log if entry[0] == "open"]
        assert kinds[0] == "quick"
        return
    check(made.run())
    assert [name for name, _ in opened(log)] == ["slow", "quick"]
    assert sorted(stage.holder for stage in made.sources.stages) == ["c", "far"]


def test_a_reader_without_blocks(peers, log):
    check(assembly(peers, ("a", "a", "c")).run())
    assert [holder for _, holder in opened(log)] == ["c", "a", "a"]


def test_all_blocks_here():
    plan = PLAN.block((1, 0))
    output = OutputSpec(("x",), X.dtype, "numpy", OPTIONS)
    blocks = [BLOCKS["x", *s] for s in plan.sources]
    check(Assembly(plan, output, blocks, LocalContext()).run())


def note_permutes(monkeypatch, log):
    real = HostQueue.permute

    def permute(self, *args, **kwargs):
        log.append(("permute",))
        real(self, *args, **kwargs)

    monkeypatch.setattr(HostQueue, "permute", permute)


def test_async_asks_ahead_and_sync_does_not(quick, peers, log, monkeypatch):
    quick.part_bytes, quick.ahead = 24, 2  # three parts a piece
    note_permutes(monkeypatch, log)
    check(assembly(peers).run())
    kinds = [entry[0] for entry in log]
    # Two requests are under way before anything is computed; own pieces come before the first
    # region is waited for.
    assert kinds[:5] == ["open", "request", "request", "request", "permute"]
    assert kinds.count("request") == 6
    assert kinds[-3:] == ["permute"] * 3
    log.clear()
    check(assembly(peers, mode="sync").run())
    kinds = [entry[0] for entry in log if entry[0] != "open"]
    assert kinds == ["permute", *["request", "permute"] * 6]


def test_the_next_block_is_opened_while_the_last_parts_of_the_one_before_are_on_their_way(
    quick, peers, log, monkeypatch
):
    quick.part_bytes, quick.ahead = 8, 2  # nine parts a piece
    note_permutes(monkeypatch, log)
    check(assembly(peers).run())
    before = log[: log.index(("open", "quick", "a", ("x", 0, 0)))]
    assert before.count(("request", ("x", 2, 0))) == 9
    assert before.count(("permute",)) == 1 + 9 - quick.ahead, "besides that of the own piece"


def test_parts_are_cut_to_size(quick, peers, log):
    quick.part_bytes = 8  # one element
    check(assembly(peers).run())
    assert sum(entry[0] == "request" for entry in log) == 18


def test_a_transport_that_fails_is_replaced_with_one_warning(quick, slow, peers, log):
    quick.fails["c", ("x", 2, 0)] = TransferError("quick broke")
    made = assembly(peers)
    check(made.run())
    assert opened(log) == [("quick", "c"), ("quick", "a"), ("slow", "c")]
    assert peers.warnings == [
        "dask_p2p: quick fails, another transport is used instead: quick broke"
    ]
    log.clear()
    check(assembly(peers).run())
    assert opened(log) == [("slow", "c"), ("quick", "a")], "it is not tried again"
    assert len(peers.warnings) == 1
    peers.router.on_worker_left("c")
    quick.fails.clear()
    log.clear()
    check(assembly(peers).run())
    assert opened(log) == [("quick", "c"), ("quick", "a")], "a new worker at that address"


def test_a_failure_in_the_middle_of_a_block(quick, slow, peers, log):
    quick.part_bytes = 24
    quick.fails["c", ("x", 2, 0)] = TransferError("broke off")
    quick.late.add(("x", 2, 0))
    made = assembly(peers)
    check(made.run())
    assert ("slow", "c") in opened(log)
    assert sorted((s.holder, s.transport) for s in made.sources.stages) == [
        ("a", "quick"),
        ("c", "slow"),
    ]
    assert quick.open_now == slow.open_now == []


def test_nothing_more_is_asked_for_of_what_failed(quick, slow, peers, log):
    quick.part_bytes = 8  # 9 parts
    quick.fails["c", ("x", 2, 0)] = TransferError("broke off")
    quick.late.add(("x", 2, 0))
    check(assembly(peers).run())
    by_quick = log[: log.index(("open", "slow", "c", ("x", 2, 0)))]
    asked = by_quick.count(("request", ("x", 2, 0)))
    assert asked == 2 + quick.ahead


@pytest.mark.parametrize("late", [False, True])
def test_what_lies_elsewhere_is_let_go_of_only_when_nothing_reads_it(
    quick, slow, peers, log, monkeypatch, late
):
    """Also where it failed: kernels that read what came before may still be queued."""
    synchronize, close = HostQueue.synchronize, FakeReading.close

    def logged(what, function):
        return lambda self: (log.append((what,)), function(self))[1]

    monkeypatch.setattr(HostQueue, "synchronize", logged("synchronize", synchronize))
    monkeypatch.setattr(FakeReading, "close", logged("close", close))
    monkeypatch.setattr(
        FakeReading, "confirm", logged("confirm", FakeReading.confirm), raising=False
    )
    quick.in_place, quick.part_bytes = True, 24
    if late:
        quick.fails["c", ("x", 2, 0)] = TransferError("broke off")
        quick.late.add(("x", 2, 0))
    check(assembly(peers).run())
    assert quick.open_now == slow.open_now == []
    kinds = [entry[0] for entry in log]
    last_request = len(kinds) - kinds[::-1].index("request")
    assert kinds[last_request:].index("synchronize") < kinds[last_request:].index("confirm")
    assert "close" not in kinds[:last_request], "what was read in place"
    assert kinds.count("close") == (3 if late else 2)


def test_an_answer_that_does_not_come_in_time(quick, slow, peers, log, monkeypatch):
    """Where the event loop that keeps the deadlines is stuck."""
    request = FakeReading.request
    monkeypatch.setattr(
        FakeReading,
        "request",
        lambda self, *args: Future() if self.transport is quick else request(self, *args),
    )
    tune(monkeypatch, event_loop_grace_s=0.0)
    check(assembly(peers, request_timeout_s=0.05).run())
    assert opened(log)[-2:] == [("slow", "c"), ("slow", "a")]
    for holder in "ac":
        text = peers.router.failure(holder, "quick").text
        loop = "the worker's event loop did not respond"
        assert text == f"no answer from {holder} in time, and {loop}"


def test_an_obstacle_is_no_failure(peers, log):
    check(assembly(peers, ("a", "b", "far")).run())
    assert ("slow", "far") in opened(log)
    assert peers.warnings == []


def test_a_block_that_is_gone_is_sought_at_its_other_holders(quick, peers, log):
    quick.fails["c", ("x", 2, 0)] = BlockUnavailableError("not there any more")
    check(assembly(peers, ("a", "b", ("c", "d"))).run())
    assert opened(log) == [("quick", "c"), ("quick", "a"), ("quick", "d")]
    assert peers.warnings == [], "the transport did nothing wrong"


def test_replicas_are_read_by_their_nearest_readers(peers, log):
    check(assembly(peers, ("a", "b", ("a", "c", "d"))).run())
    assert [holder for _, holder in opened(log)] == ["c", "a"]


def test_a_block_that_no_worker_has(quick, peers):
    quick.fails["c", ("x", 2, 0)] = BlockUnavailableError("not there any more")
    with pytest.raises(BlockUnavailableError, match=r"\('x', 2, 0\) could not be read"):
        assembly(peers).run()
    assert quick.open_now == []


@pytest.mark.parametrize("late", [False, True])
def test_a_holder_that_does_not_answer_is_not_asked_for_its_other_blocks(peers, log, late):
    quick = peers.router.transports["quick"] = FakeTransport("quick", log, part_bytes=24, ahead=0)
    quick.fails["c", ("x", 0, 0)] = UnreachableError("no answer from c")
    quick.late = {("x", 0, 0)} if late else set()
    with pytest.raises(UnreachableError, match="no answer from c"):
        assembly(peers, ("c", "b", "c")).run()
    assert opened(log) == [("quick", "c")]
    assert quick.open_now == []


def test_when_every_way_fails_the_error_names_each(quick, slow, peers):
    quick.fails["c", ("x", 2, 0)] = TransferError("c is deaf")
    slow.fails["c", ("x", 2, 0)] = TransferError("c is dumb")
    texts = []
    for _ in range(2):  # and again: what failed everywhere is tried again
        with pytest.raises(TransferError) as caught:
            assembly(peers).run()
        texts.append(str(caught.value))
    brought = "block ('x', 2, 0) could not be read: "
    assert texts == [f"{brought}quick: c is deaf; slow: c is dumb", f"{brought}slow: c is dumb"]
    assert quick.open_now == slow.open_now == []


def test_nothing_stays_open_after_an_error_that_is_not_retried(quick, peers):
    quick.fails["a", ("x", 0, 0)] = BlockMismatchError("of another shape")
    with pytest.raises(BlockMismatchError, match="another shape"):
        assembly(peers).run()
    assert quick.open_now == []


@pytest.mark.parametrize("what", ["the kernels", "a lease"])
def test_all_leases_end_whatever_else_fails(quick, peers, monkeypatch, what):
    def fail(*args):
        raise RuntimeError("the device is lost")

    def close(self):
        quick.open_now.remove(self)
        fail()

    if what == "the kernels":
        monkeypatch.setattr(HostQueue, "synchronize", fail)
    else:
        monkeypatch.setattr(FakeReading, "close", close)
    with pytest.raises(RuntimeError, match="the device is lost"):
        assembly(peers).run()
    assert quick.open_now == []


def test_what_may_be_wrong_is_not_returned(quick, peers, monkeypatch):
    def confirm(self):
        raise TransferError("the holder died under the reader")

    monkeypatch.setattr(FakeReading, "confirm", confirm)
    with pytest.raises(TransferError, match="died under"):
        assembly(peers).run()
    assert quick.open_now == []


def test_what_does_not_come_whole_is_brought_by_another_way(quick, slow, peers, monkeypatch):
    regions = FakeReading.__iter__

    def all_but_the_last(reading):
        wanted = list(regions(reading))
        return iter(wanted[:-1] if reading.transport is quick else wanted)

    monkeypatch.setattr(FakeReading, "__iter__", all_but_the_last)
    made = assembly(peers)
    check(made.run())
    assert {stage.transport for stage in made.sources.stages} == {"slow"}
    assert any("arrived incomplete" in text for text in peers.warnings)


def test_what_may_be_wrong_is_brought_by_another_way(quick, slow, peers, monkeypatch):
    """But not the confirmed regions, which are not brought again."""
    request, wrong = FakeReading.request, ("x", 2, 0)

    def request_wrong(self, of, *args):
        future = request(self, of, *args)
        if self.transport is quick and of.key == wrong:
            future.result()[...] += 1
        return future

    def confirm(self):
        if self.transport is quick and self.requests[0].key == wrong:
            raise TransferError("quick: what came is not what was sent")

    monkeypatch.setattr(FakeReading, "request", request_wrong)
    monkeypatch.setattr(FakeReading, "confirm", confirm)
    made = assembly(peers)
    np.testing.assert_array_equal(made.run(), X.T[3:6])
    assert [(stage.holder, stage.transport) for stage in made.sources.stages] == [
        ("a", "quick"),
        ("c", "slow"),
    ]
    assert peers.router.failure("c", "quick").text == "quick: what came is not what was sent"
    assert quick.open_now == slow.open_now == []


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (np.ones((3, 8)), BlockMismatchError),
        (np.ones((3, 9), "f4"), BlockMismatchError),
        (np.ma.masked_array(np.ones((3, 9))), UnsupportedArrayError),
        ([[1.0] * 9] * 3, UnsupportedArrayError),
    ],
)
def test_a_local_block_that_is_not_as_declared(peers, block, error):
    made = assembly(peers)
    made.local.blocks[1] = block
    with pytest.raises(error):
        made.run()


def test_local_blocks_of_two_libraries(peers, monkeypatch):
    monkeypatch.setattr(type(CUPY), "check", lambda self, block: None)
    made = assembly(peers, ("b", "b", "a"))
    made.local.blocks[1] = made.local.blocks[1].copy().view(DeviceArray)
    with pytest.raises(BlockMismatchError, match=r"block .* of numpy and block .* of cupy"):
        made.run()


def test_what_a_function_gets_is_its_own_and_not_known_to_be_written(peers):
    """Also of a block that would be handed on as it is."""
    block, got = X[:3].copy(), []

    def overwrite(array, index):
        got.append(array)
        array[...] = index[0]
        return array

    plan = redistribution(((3,), (9,)), (0, 1), ((3,), (9,))).block((0, 0))
    assert plan.is_copy
    output = OutputSpec(("x",), X.dtype, "numpy", OPTIONS, overwrite)
    made = Assembly(plan, output, [block], peers)
    result = made.finish(whole := made.run(), (7, 0))
    assert result is got[0] is not whole, "that array is known to be written"
    assert np.shares_memory(result, whole)
    assert not np.shares_memory(result, block)
    assert (result == 7).all()
    np.testing.assert_array_equal(block, X[:3])
    assert made.epilogue.seconds > 0
    reused = Assembly(plan, replace(output, epilogue=None), [block], peers)
    assert reused.finish(reused.run(), (0, 0)) is block
