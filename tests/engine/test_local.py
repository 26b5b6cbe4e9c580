"""The blocks that a worker holds itself: looked up and read one by one, wherever they lie."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest

from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.remote import BlockRef
from dask_p2p.errors import BlockMismatchError, MemoryLimitError, TransferError
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


KEYS = list(BLOCKS)


def test_local_and_remote_blocks_together():
    log = []
    transports = FakeTransport("quick", log), FakeTransport("slow", log)
    store = Store(*transports, blocks={KEYS[1]: BLOCKS[KEYS[1]]}, spilled=[KEYS[1]])
    task_assembly = assembly(store, (("a",), (HERE, "c"), ("c",)))
    check(task_assembly.run())
    assert store.read == [KEYS[1]]
    assert opened(log) == [("quick", "c"), ("quick", "a")]
    assert store.served == [], "a spilled block is not published ahead"


def test_a_block_that_is_gone_is_asked_for_again():
    """As of a task that was cancelled, or where Dask has moved the block."""
    store = Store(blocks={key: BLOCKS[key] for key in KEYS[:2]})
    with pytest.raises(TransferError, match=r"block \('x', 2, 0\) is no longer on b"):
        assembly(store).run()


def test_a_disk_that_fails_is_named(monkeypatch):
    def fail(key):
        raise OSError(5, "Input/output error")

    store = Store(blocks=BLOCKS, spilled=KEYS)
    monkeypatch.setattr(store, "block", fail)
    with pytest.raises(TransferError, match=r"\('x', 0, 0\) cannot be read from disk: .*output er"):
        assembly(store).run()


@pytest.mark.parametrize("spilled", [[], KEYS])
def test_blocks_that_are_not_as_declared(spilled):
    store = Store(blocks={**BLOCKS, KEYS[2]: np.ones((3, 8))}, spilled=spilled)
    with pytest.raises(BlockMismatchError, match=r"\('x', 2, 0\).*\(3, 9\).*\(3, 8\)"):
        assembly(store).run()


def test_no_more_memory_is_asked_for_than_for_one_block():
    """216 bytes for the output, and as many for a block: not for all three."""
    store = Store(blocks=BLOCKS, spilled=KEYS)
    store.memory = 2 * 216
    check(assembly(store).run())
    store.memory -= 1
    with pytest.raises(MemoryLimitError, match="216 B for this worker's input blocks"):
        assembly(store).run()
    store = Store(blocks=BLOCKS, spilled=KEYS[1:])
    store.memory = 3 * 216  # beside one that is there
    check(assembly(store).run())


def test_a_spilled_block_is_of_the_kind_that_it_had():
    """Of one that dask-cuda has spilled, the bytes lie in host memory."""
    store = Store(blocks=BLOCKS, spilled=KEYS)
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
    on_gpu = {key: BLOCKS[key].copy().view(DeviceArray) for key in KEYS[:2]}
    store = Store(blocks={**BLOCKS, **on_gpu}, spilled=KEYS[2:])
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
