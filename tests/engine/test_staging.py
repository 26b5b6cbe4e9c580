"""What a task and a holder really hold, counted, for limits of all sizes."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dask_p2p.backends.host import HostQueue
from dask_p2p.config import options
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.remote import BlockRef
from dask_p2p.errors import TransferError
from dask_p2p.geometry import box_shape, box_size, box_slices
from dask_p2p.plans import redistribution, slab_chunks
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.packed import CommTransport
from dask_p2p.transports.packed_reading import PackedReading
from dask_p2p.transports.ucx import UcxTransport
from tests.engine.test_assembly import FakePeers
from tests.support import BOUND_S
from tests.transports.loopback import LoopbackHost, wait_until
from tests.transports.reading import open_block
from tests.usage import usage

X = np.arange(24 * 24.0).reshape(24, 24)
CHUNKS = ((8, 8, 8), (24,))
PLAN = redistribution(CHUNKS, (1, 0), slab_chunks(CHUNKS, (1, 0))).block((0, 0))
BLOCKS = {("x", i, 0): X[8 * i : 8 * i + 8] for i in range(3)}
ITEM = X.itemsize
# Smaller than one item, than a part of one row, than a region (of 512 bytes), than all of them.
LIMITS = [1, 9, 64, 100, 300, 1000, 3000, 100_000]


class Meter:
    """Bytes that are there at the same time."""

    def __init__(self):
        self.now_bytes = self.peak_bytes = 0
        self._lock = threading.RLock()

    def add(self, nbytes):
        with self._lock:
            self.now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def until_gone(self, array, nbytes):
        weakref.finalize(array, self.add, -nbytes)


@pytest.fixture
def make(loop, tmp_path):
    """Give a function that makes a reader's transports, and those of the holders of blocks."""
    network, worker_contexts = {}, []

    def make_transport(cls, address, options, blocks=()):
        host = network.get(address) or LoopbackHost(address, loop.loop, network, tmp_path)
        transport = cls(host, options)
        host.handlers.update(transport.handlers())
        host.blocks = dict(blocks)
        worker_contexts.append(transport)
        return transport

    yield make_transport
    for transport in worker_contexts:
        loop.run(transport.close())
    for host in network.values():
        host.close()


def assemble(chosen, holders, **transports):
    output = OutputSpec(("x",), X.dtype, "numpy", replace(chosen, transports=tuple(transports)))
    refs = [BlockRef(key, (holder,)) for key, holder in zip(BLOCKS, holders, strict=True)]
    peers = FakePeers(*transports.values())
    peers.address = "reader"
    np.testing.assert_array_equal(Assembly(PLAN, output, refs, peers).run(), X.T[:8])
    assert peers.warnings == []


@pytest.fixture
def buffers(monkeypatch):
    """Meters of all buffers that are in use, by the pool that they are of."""
    meters = {}
    take, put_back = Buffers.take, Buffers.put_back

    def lend(self, shape, dtype):
        nbytes = buffer_bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        meters.setdefault(self, Meter()).add(nbytes)
        return take(self, shape, dtype)

    def given_back(self, size_bytes, memory):
        meters[self].add(-size_bytes)
        put_back(self, size_bytes, memory)

    monkeypatch.setattr(Buffers, "take", lend)
    monkeypatch.setattr(Buffers, "put_back", given_back)
    return meters


# --- the reader ---


@pytest.mark.parametrize("limit_bytes", LIMITS)
def test_comm(make, monkeypatch, limit_bytes):
    chosen = replace(options(), staging_limit_bytes=limit_bytes)
    reader = make(CommTransport, "reader", chosen)
    for holder in "abc":
        make(CommTransport, holder, options(), BLOCKS)
    meter = Meter()
    bring = PackedReading.bring

    async def metered(self, parts, landing, where):
        meter.add(sum(box_size(part.box) for part in parts) * ITEM)
        regions = await bring(self, parts, landing, where)
        for region in regions:
            meter.until_gone(region, region.nbytes)
        return regions

    monkeypatch.setattr(PackedReading, "bring", metered)
    assemble(chosen, "abc", comm=reader)
    assert 0 < meter.peak_bytes <= max(limit_bytes, ITEM)


@pytest.mark.parametrize("limit_bytes", LIMITS)
def test_ucx(make, buffers, limit_bytes):
    pytest.importorskip("ucxx")
    chosen = replace(options(), staging_limit_bytes=limit_bytes)
    reader = make(UcxTransport, "reader", chosen)
    for holder in "abc":
        make(UcxTransport, holder, chosen, BLOCKS)
    assemble(chosen, "abc", ucx=reader)
    assert len(buffers) == 4, "of the reader and of each holder"
    smallest_bytes = buffer_bytes(1)
    for meter in buffers.values():
        assert 0 < meter.peak_bytes <= max(limit_bytes, smallest_bytes)
    wait_until(lambda: all(meter.now_bytes == 0 for meter in buffers.values()))


# --- the holder ---


def read_at_once(reader, key, boxes, chosen, times=6):
    """Read all boxes, one after another, so often at the same time; return the results' bytes."""
    request_fields = "holder", key, X.shape, X.dtype, "numpy"

    def read():
        with closing(open_block(reader, *request_fields, boxes, chosen)) as remote:
            return b"".join(np.array(remote.request().result(BOUND_S)).tobytes() for _ in boxes)

    with ThreadPoolExecutor(times) as threads:
        return [future.result() for future in [threads.submit(read) for _ in range(times)]]


BOXES = [((0, 24), (i, i + 4)) for i in range(0, 24, 4)]  # 768 bytes each, not contiguous
EXPECTED = b"".join(np.ascontiguousarray(X[box_slices(box)]).tobytes() for box in BOXES)


@pytest.mark.parametrize("limit_bytes", [1, 800, 1600, 3000])
def test_what_comm_packs_for_others(make, monkeypatch, limit_bytes):
    reader = make(CommTransport, "reader", options())
    chosen = replace(options(), staging_limit_bytes=limit_bytes)
    serving = make(CommTransport, "holder", chosen, {"x": X})
    meter = Meter()
    scratch = HostQueue.scratch

    def metered(self, shape, dtype):
        array = scratch(self, shape, dtype)
        meter.add(array.nbytes)
        meter.until_gone(array, array.nbytes)
        return array

    monkeypatch.setattr(HostQueue, "scratch", metered)
    assert set(read_at_once(reader, "x", BOXES, options())) == {EXPECTED}
    assert 0 < meter.peak_bytes <= max(limit_bytes, 768)
    wait_until(lambda: serving.packed.reserved_bytes == 0)  # the holder may end after its reader


@pytest.mark.slow
@pytest.mark.parametrize("cls", [CommTransport, UcxTransport])
def test_a_holder_that_never_has_room_reports_it(make, cls):
    if cls is UcxTransport:
        pytest.importorskip("ucxx")
    chosen = replace(options(), request_timeout_s=4.0)  # the holder gives up before the reader
    reader = make(cls, "reader", options())
    serving = make(cls, "holder", replace(chosen, staging_limit_bytes=1000), {"x": X})
    (reservation,) = serving.packed.reserve(1000)
    read = partial(read_at_once, reader, "x", BOXES, chosen)
    with pytest.raises(TransferError, match="outgoing staging limit"):
        read(times=1)
    wait_until(lambda: not any(usage(serving).values()))
    reservation()
    wait_until(lambda: serving.packed.reserved_bytes == 0)
    assert read_at_once(reader, "x", BOXES, options(), times=1) == [EXPECTED]
    assert box_shape(BOXES[0]) == (24, 4)
