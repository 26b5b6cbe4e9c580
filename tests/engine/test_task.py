"""The task of an output block: its inputs, and blocks that its worker holds itself."""

import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from dask.task_spec import Task, TaskRef
from distributed import Reschedule

from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.engine import task as module
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.context import TaskContext
from dask_p2p.engine.remote import BlockRef, Fetch, RemoteSource
from dask_p2p.engine.task import AssembleTask, Blocks, WaitTask, is_fusable, run_name
from dask_p2p.errors import BlockMismatchError, MemoryLimitError, TransferError
from dask_p2p.geometry import box_size
from dask_p2p.plans import Piece, redistribution
from dask_p2p.transports.base import Reading, Request
from dask_p2p.transports.buffers import Footprint
from dask_p2p.transports.router import Route
from tests.engine.test_assembly import (
    BLOCKS,
    OPTIONS,
    PLAN,
    FakePeers,
    FakeTransport,
    X,
    check,
    opened,
)
from tests.simulation.gpu import DeviceArray

TASK_PLAN = redistribution(((2, 2), (4,)), (1, 0), ((2, 2), (4,)))
OUTPUT = OutputSpec(("x",), np.dtype("i8"), "numpy", options())
KEYS = [("x", 0, 0), ("x", 1, 0)]


@pytest.fixture
def task():
    key, function = ("y", 1, 0), module.assemble_block
    return AssembleTask(key, function, key, TASK_PLAN, (1, 0), OUTPUT, Blocks(*KEYS))


@pytest.mark.parametrize(
    ("key", "name", "is_ours"),
    [
        (("p2p-on-gpu-01", 0), "p2p-on-gpu-01", True),
        (("array-p2p-on-gpu-01", 0), "p2p-on-gpu-01", True),
        (("array-01", 0), "array-01", False),
        ((7, 0), 7, False),
        ("finalize-01", "finalize-01", False),
    ],
)
def test_a_task_that_is_fused_has_the_name_of_its_array(key, name, is_ours):
    assert (run_name(key), is_fusable(key)) == (name, is_ours)


def test_dependencies_are_all_blocks_that_are_read(task):
    assert task.dependencies == frozenset(KEYS)
    assert task.block_fusion


def test_it_survives_pickling_and_renaming(task):
    again = pickle.loads(pickle.dumps(task))
    assert (again.dependencies, again.args) == (task.dependencies, task.args)
    renamed = task.substitute({KEYS[0]: ("z", 0, 0)})
    assert (type(renamed), renamed.dependencies) == (AssembleTask, {("z", 0, 0), KEYS[1]})
    other = task.substitute({}, key=("other", 1, 0))
    assert other.args == (other.key, *task.args[1:]), "records have the new key"


def test_the_text_about_attempts_is_bounded():
    log = TaskContext("tcp://here")
    for i in range(1000):
        count, causes = log.count_attempt("key", f"{i} {'x' * 10_000}")
    assert count == 1000
    assert "attempt 1000: 999 x" in causes
    assert "x ..." in causes, "omitted text is marked"
    assert len(causes) < 5000


def test_a_task_that_waits_reads_nothing_of_what_it_waits_for():
    waits = WaitTask("z", lambda _, read, by: read * by, Blocks(("all", 0)), TaskRef(KEYS[0]), 3)
    assert waits.dependencies == {("all", 0), KEYS[0]}
    assert waits.blocks.dependencies == {("all", 0)}
    assert [*waits.reads()] == [(KEYS[0], 1)]
    assert waits({("all", 0): None, KEYS[0]: 2}) == 6
    rewritten = waits.substitute({("all", 0): BlockRef("all", ())})
    assert (type(rewritten), rewritten.dependencies) == (WaitTask, {KEYS[0]})
    assert rewritten({KEYS[0]: 2}) == 6
    fused = Task.fuse(waits, Task("after", lambda z: z + 1, TaskRef("z")))
    assert fused({("all", 0): None, KEYS[0]: 2}) == 7


def test_failures_are_rescheduled_with_growing_pauses_and_then_raised(monkeypatch):
    pauses_s = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pauses_s.append))
    chosen = options()
    runtime = TaskContext("tcp://here")
    error = TransferError("comm: tcp://there is deaf")
    for _ in range(2):  # whoever wants it again is given as many attempts again
        for _ in range(chosen.attempts - 1):
            with pytest.raises(Reschedule):
                module.reschedule_failed("key", error, runtime, chosen)
        assert pauses_s[:3] == [0.05, 0.1, 0.2]
        assert max(pauses_s) <= 2.0
        with pytest.raises(
            TransferError,
            match=r"'key' failed 8 times on tcp://here: attempts 1 to 8:.*deaf\. Check",
        ):
            module.reschedule_failed("key", error, runtime, chosen)
        pauses_s.clear()


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


HERE = "b"  # the address of `FakePeers`


class Store(FakePeers):
    """A worker with blocks, some of which are spilled: these are made anew for whoever reads."""

    def __init__(self, *transports, blocks, spilled=()):
        super().__init__(*transports)
        self.blocks, self.spilled = dict(blocks), set(spilled)
        self.read = []  # keys of blocks, in the order in which they were read from disk
        self.made, self.most_alive = [], 0
        self.kind = "numpy"

    def holds(self, key):
        return key in self.blocks

    def in_memory(self, key):
        if key in self.spilled:
            raise KeyError(key)
        return self.blocks[key]

    def block(self, key):
        if key not in self.spilled:
            return self.blocks[key]
        self.read.append(key)
        block = self.blocks[key].copy()
        self.made.append(weakref.ref(block))
        self.most_alive = max(self.most_alive, self.alive)
        return block

    @property
    def alive(self):
        """How many blocks that were read are still there."""
        return sum(reference() is not None for reference in self.made)

    def kind_of(self, key):
        return self.kind


def assembly(store, holders=((HERE,), (HERE,), (HERE,)), plan=None, dtype=X.dtype, **changes):
    plan = plan or PLAN.block((1, 0))
    output = OutputSpec(("x",), dtype, "numpy", replace(OPTIONS, **changes))
    blocks = [
        BlockRef(("x", *source), holders_of_block)
        for source, holders_of_block in zip(plan.sources, holders, strict=True)
    ]
    return Assembly(plan, output, blocks, store)


ALL_KEYS = list(BLOCKS)


def test_local_and_remote_blocks_together():
    log = []
    transports = FakeTransport("quick", log), FakeTransport("slow", log)
    store = Store(*transports, blocks={ALL_KEYS[1]: BLOCKS[ALL_KEYS[1]]}, spilled=[ALL_KEYS[1]])
    task_assembly = assembly(store, (("a",), (HERE, "c"), ("c",)))
    check(task_assembly.run())
    assert store.read == [ALL_KEYS[1]]
    assert opened(log) == [("quick", "c"), ("quick", "a")]
    assert store.served == [], "a spilled block is not published ahead"


def test_a_block_that_is_gone_is_asked_for_again():
    """As of a task that was cancelled, or where Dask has moved the block."""
    store = Store(blocks={key: BLOCKS[key] for key in ALL_KEYS[:2]})
    with pytest.raises(TransferError, match=r"block \('x', 2, 0\) is no longer on b"):
        assembly(store).run()


def test_a_disk_that_fails_is_named(monkeypatch):
    store = Store(blocks=BLOCKS, spilled=ALL_KEYS)
    monkeypatch.setattr(store, "block", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(TransferError, match=r"\('x', 0, 0\) cannot be read from disk: .*output er"):
        assembly(store).run()


@pytest.mark.parametrize("spilled", [[], ALL_KEYS])
def test_blocks_that_are_not_as_declared(spilled):
    store = Store(blocks={**BLOCKS, ALL_KEYS[2]: np.ones((3, 8))}, spilled=spilled)
    with pytest.raises(BlockMismatchError, match=r"\('x', 2, 0\).*\(3, 9\).*\(3, 8\)"):
        assembly(store).run()


def test_no_more_memory_is_asked_for_than_for_one_block():
    """216 bytes for the output, and as many for a block: not for all three."""
    store = Store(blocks=BLOCKS, spilled=ALL_KEYS)
    store.memory = 2 * 216
    check(assembly(store).run())
    store.memory -= 1
    with pytest.raises(MemoryLimitError, match="216 B for this worker's input blocks"):
        assembly(store).run()
    store = Store(blocks=BLOCKS, spilled=ALL_KEYS[1:])
    store.memory = 3 * 216  # beside one that is there
    check(assembly(store).run())


def test_a_spilled_block_is_of_the_kind_that_it_had():
    """Of one that dask-cuda has spilled, the bytes lie in host memory."""
    store = Store(blocks=BLOCKS, spilled=ALL_KEYS)
    store.kind = "cupy"
    task_assembly = assembly(store)
    assert task_assembly._kind(task_assembly.in_memory()) == "cupy"
    store.kind = None
    assert task_assembly._kind(task_assembly.in_memory()) == "numpy", "as declared"


class DeviceQueue(HostQueue):
    """A queue whose kernels read their arrays when it is synchronised."""

    def __init__(self):
        super().__init__(NUMPY)
        self.kind, self.queued, self.uploaded, self.waited = "cupy", [], [], []

    def wait_until_written(self, blocks, *, any_stream):
        self.waited += blocks

    def permute(self, dst, src, axes, *, concurrent=False):
        reference = weakref.ref(src.base)
        self.queued.append((dst, reference, axes))

    def permute_and_drop(self, dst, src, axes):
        self.uploaded.append(src.nbytes)
        NUMPY.permute_into(dst, src, axes)


def test_blocks_on_a_gpu_stay_until_its_kernels_are_done(monkeypatch):
    """And spilled ones go there by parts."""
    monkeypatch.setattr(type(CUPY), "check", lambda self, block: None)
    on_gpu = {key: BLOCKS[key].copy().view(DeviceArray) for key in ALL_KEYS[:2]}
    store = Store(blocks={**BLOCKS, **on_gpu}, spilled=ALL_KEYS[2:])
    task_assembly = assembly(store, staging_limit_bytes=8 * 24)
    assert task_assembly.local_bytes(task_assembly.in_memory(), "cupy") == 2 * 216 + 3 * 24
    queue, out = DeviceQueue(), np.zeros((3, 9))
    task_assembly.hold(queue)
    task_assembly.put_local_into(out, queue)
    store.blocks.clear()
    on_gpu.clear()
    assert len(queue.waited) == 2
    queue.waited.clear()
    assert all(reference() is not None for _, reference, _ in queue.queued)
    task_assembly.being_read = {}
    assert all(reference() is None for _, reference, _ in queue.queued)
    assert queue.uploaded == [24, 24, 24]
    np.testing.assert_array_equal(out[:, 6:], X.T[3:6, 6:])
