"""Assemblies with transports that do what a test says: order, overlap, failures, leases."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.host import HostQueue
from dask_p2p.config import options
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.remote import BlockRef
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.geometry import box_slices
from dask_p2p.plans import redistribution, slab_chunks
from dask_p2p.transports.base import Reading, Transport
from dask_p2p.transports.buffers import Footprint
from dask_p2p.transports.router import Router
from tests.simulation.gpu import DeviceArray
from tests.support import noted, tune

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
    handlers = close = None

    def __init__(self, name, log, part_bytes=None, ahead=1):
        super().__init__(None, options())
        self.name = name
        self.log = log
        self.fails = {}
        self.late = set()
        self.open_now = []
        self.part_bytes, self.ahead = part_bytes, ahead

    def obstacle(self, holder, kind, dtype):
        return "far away" if holder == "far" and self.name == "quick" else None

    def probe(self, holder, kind):
        pass

    def footprint(self, options, kind):
        return Footprint(self.part_bytes, self.ahead)

    def read(self, requests, options):
        self.requests = requests
        return FakeReading(self, requests, self.footprint(options, "numpy"), options)


class FakeReading(Reading):
    """Notes when each block is opened, and when each of its regions is requested."""

    def __init__(self, transport, requests, flow, options):
        super().__init__(requests, flow)
        self.transport = transport
        self.request_counts = Counter()
        transport.open_now.append(self)

    def __iter__(self):
        for part in self.parts():
            request = self.requests[part.request]
            error = self.transport.fails.get((request.holder, request.key))
            if not self.request_counts[request.key]:
                opening = ("open", self.transport.name, request.holder, request.key)
                self.transport.log.append(opening)
                if error is not None and request.key not in self.transport.late:
                    self.drop(part.request)
                    yield part.mark_failed(error)
                    continue
            future = self.request(request, part.box, error)
            bring = partial(lambda future, timeout_s, _: future.result(timeout_s), future)
            yield part.mark_requested(bring, future.done)
            del bring
            del future

    def request(self, request, box, error):
        self.transport.log.append(("request", request.key))
        self.request_counts[request.key] += 1
        future = Future()
        if error is not None and self.request_counts[request.key] == 2:
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


def assembly(peers, holders=("a", "b", "c"), address="b", index=(1, 0), **changes):
    """Output block 1; source block i is held by holders[i]."""
    plan = PLAN.block(index)
    output = OutputSpec(("x",), X.dtype, "numpy", replace(OPTIONS, **changes))
    blocks = [
        BLOCKS["x", *source]
        if holder == address
        else BlockRef(("x", *source), holder if isinstance(holder, tuple) else (holder,))
        for source, holder in zip(plan.sources, holders, strict=True)
    ]
    return Assembly(plan, output, blocks, peers)


def opened(log):
    return [entry[1:3] for entry in log if entry[0] == "open"]


def check(result):
    np.testing.assert_array_equal(result, X.T[3:6])


def test_a_transport_gets_the_axis_that_comes_last_in_the_output(peers, quick):
    check(assembly(peers).run())
    assert [request.fast_axis for request in quick.requests] == [0]


def test_the_own_host_is_read_while_others_are_waited_for(quick, slow, peers, log, monkeypatch):
    """The far region comes only when the last near one has been request_counts for."""
    quick.within_host, quick.part_bytes = True, 24
    request, far = FakeReading.request, []

    def count_request(self, requested, *args):
        future = request(self, requested, *args)
        if self.transport is slow:
            far.append((Future(), future))
            return far[-1][0]
        if self.request_counts[requested.key] == 3:
            for future_far, real in far:
                future_far.set_result(real.result())
        return future

    monkeypatch.setattr(FakeReading, "request", count_request)
    tune(monkeypatch, event_loop_grace_s=0.0)
    task_assembly = assembly(peers, ("far", "b", "c"), request_timeout_s=60.0)
    check(task_assembly.run())
    assert [name for name, _ in opened(log)] == ["slow", "quick"]
    assert sorted(stage.holder for stage in task_assembly.sources.stages) == ["c", "far"]


def note_calls(monkeypatch, log, owner, *names):
    for name in names:
        noted(monkeypatch, owner, name, lambda *_, name=name, **__: log.append((name,)))


@pytest.mark.parametrize(("holder", "ahead"), [("a", 2), ("far", 0)])
def test_the_next_block_is_opened_while_the_last_parts_of_the_one_before_are_on_their_way(
    quick, slow, peers, log, monkeypatch, holder, ahead
):
    """But not if another transport brings it: each may fill the whole staging budget."""
    for transport in (quick, slow):
        transport.part_bytes, transport.ahead = 8, 2  # nine parts a piece
    note_calls(monkeypatch, log, HostQueue, "permute")
    check(assembly(peers, (holder, "b", "c")).run())
    second = opened(log)[1]
    before = log[: [entry[1:3] for entry in log].index(second)]
    assert sum(entry[0] == "request" for entry in before) == 9
    assert before.count(("permute",)) == 1 + 9 - ahead, "besides that of the own piece"


def test_parts_of_a_block_that_has_failed_are_not_placed(quick, peers, log, monkeypatch):
    quick.part_bytes, quick.ahead = 8, 2
    quick.fails["c", ("x", 2, 0)] = TransferError("broke off")
    quick.late.add(("x", 2, 0))
    note_calls(monkeypatch, log, HostQueue, "permute")
    check(assembly(peers).run())
    assert log.count(("permute",)) == 1 + 9 + 1 + 1, "one part of it, and later the whole"


@pytest.mark.parametrize("late", [False, True])
def test_what_lies_elsewhere_is_let_go_of_only_when_nothing_reads_it(
    quick, slow, peers, log, monkeypatch, late
):
    """Also where it failed: kernels that read what came before may still be queued."""
    note_calls(monkeypatch, log, HostQueue, "synchronize")
    note_calls(monkeypatch, log, FakeReading, "close", "confirm")
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


@pytest.mark.parametrize("failing_part", ["the kernels", "a lease"])
def test_all_leases_end_whatever_else_fails(quick, peers, monkeypatch, failing_part):
    def fail(*args):
        raise RuntimeError("the device is lost")

    def close(self):
        quick.open_now.remove(self)
        fail()

    if failing_part == "the kernels":
        monkeypatch.setattr(HostQueue, "synchronize", fail)
    else:
        monkeypatch.setattr(FakeReading, "close", close)
    with pytest.raises(RuntimeError, match="the device is lost"):
        assembly(peers).run()
    assert quick.open_now == []


def test_what_does_not_come_whole_is_brought_by_another_way(quick, slow, peers, monkeypatch):
    regions = FakeReading.__iter__

    def all_but_the_last(reading):
        all_regions = list(regions(reading))
        return iter(all_regions[:-1] if reading.transport is quick else all_regions)

    monkeypatch.setattr(FakeReading, "__iter__", all_but_the_last)
    task_assembly = assembly(peers)
    check(task_assembly.run())
    assert {stage.transport for stage in task_assembly.sources.stages} == {"slow"}
    assert any("arrived incomplete" in text for text in peers.warnings)


def test_what_may_be_wrong_is_brought_by_another_way(quick, slow, peers, monkeypatch):
    """But not the confirmed regions, which are not brought again."""
    request, wrong_key = FakeReading.request, ("x", 2, 0)

    def request_wrong(self, requested, *args):
        future = request(self, requested, *args)
        if self.transport is quick and requested.key == wrong_key:
            future.result()[...] += 1
        return future

    def confirm(self):
        if self.transport is quick and self.requests[0].key == wrong_key:
            raise TransferError("quick: what came is not what was sent")

    monkeypatch.setattr(FakeReading, "request", request_wrong)
    monkeypatch.setattr(FakeReading, "confirm", confirm)
    task_assembly = assembly(peers)
    check(task_assembly.run())
    ways = [(stage.holder, stage.transport) for stage in task_assembly.sources.stages]
    assert ways == [("a", "quick"), ("c", "slow")]
    assert peers.router.failures.get(("c", "quick")).text == "quick: what came is not what was sent"
    assert quick.open_now == slow.open_now == []


def test_local_blocks_of_two_libraries(peers, monkeypatch):
    monkeypatch.setattr(type(CUPY), "check", lambda self, block: None)
    task_assembly = assembly(peers, ("b", "b", "a"))
    task_assembly.local[1] = task_assembly.local[1].copy().view(DeviceArray)
    with pytest.raises(BlockMismatchError, match=r"block .* of numpy and block .* of cupy"):
        task_assembly.run()


def test_what_a_function_gets_is_its_own_and_not_known_to_be_written(peers):
    """Also of a block that would be handed on as it is."""
    block, arguments = X[:3].copy(), []

    def overwrite(array, index):
        arguments.append(array)
        array[...] = index[0]
        return array

    plan = redistribution(((3,), (9,)), (0, 1), ((3,), (9,))).block((0, 0))
    assert plan.is_copy
    output = OutputSpec(("x",), X.dtype, "numpy", OPTIONS, overwrite)
    task_assembly = Assembly(plan, output, [block], peers)
    result = task_assembly.finish(block_before := task_assembly.run(), (7, 0))
    assert result is arguments[0] is not block_before, "that array is known to be written"
    assert np.shares_memory(result, block_before)
    assert not np.shares_memory(result, block)
    assert (result == 7).all()
    np.testing.assert_array_equal(block, X[:3])
    reused = Assembly(plan, replace(output, epilogue=None), [block], peers)
    assert reused.finish(reused.run(), (0, 0)) is block
