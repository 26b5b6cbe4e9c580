"""Blocks that do not fit: refused ahead, or a named error; and nothing kept by it."""

import gc
import os
import weakref
from concurrent.futures import Future
from dataclasses import replace
from traceback import extract_tb, format_exception

import dask.array as da
import numpy as np
import pytest
from distributed import get_worker

from dask_p2p import fused, iterate, map_overlap, spmd
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import transport_classes
from dask_p2p.engine.context import SMALLER_CHUNKS, MemoryNeed, in_memory_bytes, is_out_of_memory
from dask_p2p.engine.task import drops_frames
from dask_p2p.errors import (
    BlockMismatchError,
    MemoryLimitError,
    SectionError,
    TransferError,
    without_frames,
)
from dask_p2p.geometry import block_bounds, box_slices
from dask_p2p.transports import buffers as footprint
from dask_p2p.transports.buffers import Buffers, Footprint
from tests.engine.test_assembly import (
    BLOCKS,
    FakePeers,
    FakeReading,
    FakeTransport,
    assembly,
    check,
)
from tests.support import result_of
from tests.transports.loopback import wait_until

MIB = 2**20


def test_what_can_never_fit_is_refused_with_figures():
    always = {"for itself": 4 * MIB, "for inputs": MIB, "for no purpose": 0}
    need = MemoryNeed(always, ({"for regions": MIB}, {"to fold": MIB, "to cut": MIB}))
    need.check(None, "a block", "worker a", SMALLER_CHUNKS)
    with pytest.raises(MemoryLimitError) as caught:
        need.check(6 * MIB, "a block", "worker a", SMALLER_CHUNKS)
    error = caught.value
    for words in ("6.00 MiB (6,291,456 bytes) of worker a", "needs 7.00 MiB",
                  "4.00 MiB for itself, 1.00 MiB for inputs, 1.00 MiB for regions, or afterwards "
                  "1.00 MiB to fold and 1.00 MiB to cut; ",
                  "1.00 MiB (1,048,576 bytes) are missing", "chunks=", "more workers"):  # fmt: skip
        assert words in str(error)
    assert (error.needed_bytes, error.missing_bytes) == (7 * MIB, MIB)
    assert str(need) == str(replace(need, phases=(*need.phases, {}))), "a phase without memory"
    with pytest.raises(MemoryLimitError, match="of the GPU of worker a, got one"):
        replace(need, kind="cupy").check(0, "a block", "worker a", SMALLER_CHUNKS)


def test_what_counts_as_out_of_memory():
    class CUDARuntimeError(RuntimeError):
        def __init__(self, status):
            self.status = status

    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, "u1")
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(CUDARuntimeError(2))
    assert not is_out_of_memory(CUDARuntimeError(700))
    assert not is_out_of_memory(RuntimeError())


def test_what_arrays_take(tmp_path):
    x = np.ones((30, 40))
    np.save(tmp_path / "x.npy", x)
    assert in_memory_bytes(x) == in_memory_bytes(x.T) == x.nbytes
    assert in_memory_bytes(np.broadcast_to(1.0, (10**6, 10**6))) == 8
    assert in_memory_bytes(np.broadcast_to(x[0], (10**6, 40))) == 320
    assert in_memory_bytes(np.load(tmp_path / "x.npy", mmap_mode="r")[3:]) == 0
    assert in_memory_bytes(np.ones((0, 5))) == 0
    assert in_memory_bytes(3.0) == 0


# --- an assembly of 9 x 3 items whose holders are a, itself (b), c ---


@pytest.fixture
def log():
    return []


@pytest.fixture
def quick(log):
    return FakeTransport("quick", log, part_bytes=24, ahead=2)


class Quick(FakeTransport):
    name = "quick"

    @classmethod
    def footprint(cls, options, kind):
        return Footprint(2**40, 0, copies=1, is_buffered=False, comes_in_batches=True)


@pytest.fixture
def peers(quick, log, monkeypatch):
    monkeypatch.setitem(transport_classes(), "quick", Quick)
    # Its cache may have a result for the same options, without this transport.
    monkeypatch.setattr(
        "dask_p2p.engine.assembly.staging_bytes", footprint.staging_bytes.__wrapped__
    )
    return FakePeers(quick, FakeTransport("slow", log))


def test_a_task_is_refused_before_it_does_anything(peers, log, monkeypatch):
    # 216 bytes each for the output and its own block, 144 for all that comes.
    peers.memory = 2 * 216 + 144
    check(assembly(peers).run())
    assert log
    log.clear()
    peers.served.clear()
    monkeypatch.setattr(type(NUMPY), "empty", lambda *args: pytest.fail("it allocates"))
    peers.memory -= 1
    with pytest.raises(MemoryLimitError, match=r"576 B.*worker b|worker b.*needs 576 B") as caught:
        assembly(peers).run()
    assert "p2p.memory.staging-limit (now 2.00 GiB)" in str(caught.value)
    assert caught.value.missing_bytes == 1
    assert log == peers.served == []


def test_what_is_done_to_the_block_afterwards_counts(peers):
    class Epilogue:
        def extra_bytes(self, shape, dtype):
            assert (shape, dtype) == ((3, 9), np.dtype("f8"))
            return 500

    task_assembly = assembly(peers)
    task_assembly.output = replace(task_assembly.output, epilogue=Epilogue())
    peers.memory = 2 * 216 + 499  # what comes, 144 bytes, is gone by then
    with pytest.raises(MemoryLimitError, match="transfer, or afterwards 500 B to transform it"):
        task_assembly.run()
    peers.memory += 1
    check(task_assembly.run())


class NthFails:
    """Stands in for a function that allocates; keeps weak references to what it gave."""

    def __init__(self, function, number):
        self.function, self.number = function, number
        self.references = []

    def __call__(self, *args, **kwargs):
        if len(self.references) + 1 == self.number:
            raise MemoryError("no 1.00 GiB")
        result = self.function(*args, **kwargs)
        self.references.append(weakref.ref(result))
        return result


@pytest.fixture
def outputs(monkeypatch):
    """Allocations of outputs, of which the second fails; and no collection of garbage."""
    outputs = NthFails(NUMPY.empty, 2)
    monkeypatch.setattr(NUMPY, "empty", outputs, raising=False)
    gc.disable()  # what goes must go without it
    yield outputs
    gc.enable()


def test_staging_that_cannot_be_allocated_leaves_nothing_behind(peers, quick, outputs, monkeypatch):
    parts = NthFails(np.copy, 4)

    def request(self, request, box, error):
        future = Future()
        future.set_result(parts(BLOCKS[request.key][box_slices(box)]))
        return future

    monkeypatch.setattr(FakeReading, "request", request)
    with pytest.raises(MemoryLimitError, match="needs 576 B: 216 B for itself") as caught:
        assembly(peers).run()
    assert quick.open_now == []
    assert len(outputs.references) == 1
    assert all(reference() is None for reference in (*outputs.references, *parts.references))
    assert caught.value.missing_bytes is None
    assert caught.value.__cause__ is caught.value.__context__ is None
    outputs.number = parts.number = 0
    check(assembly(peers).run())


def test_no_memory_for_an_answer_leaves_nothing_behind(peers, quick, outputs):
    """An error that a future brings refers to the future, and so to itself."""
    quick.fails["c", ("x", 2, 0)] = MemoryError("no 1.00 GiB")
    quick.late.add(("x", 2, 0))
    with pytest.raises(MemoryLimitError, match=r"on worker b \(MemoryError: no 1\.00 GiB\)"):
        assembly(peers).run()
    assert quick.open_now == []
    assert [reference() for reference in outputs.references] == [None]


def test_idle_buffers_are_given_up_before_there_is_an_error(monkeypatch):
    from dask_p2p.transports import buffers as module

    buffers = Buffers("numpy", 2**20)
    del (buffers_lent := [buffers.take((1000,), "u1")])[:]
    assert buffers_lent == []
    assert buffers.idle_bytes == 1024
    real, tries = module.allocate, []

    def allocate(kind, size_bytes):
        tries.append(size_bytes)
        if buffers.idle_bytes:
            raise MemoryError
        return real(kind, size_bytes)

    monkeypatch.setattr(module, "allocate", allocate)
    assert buffers.take((3000,), "u1").nbytes == 3000
    assert tries == [4096, 4096]
    monkeypatch.setattr(module, "allocate", NthFails(real, 1))
    with pytest.raises(MemoryError):
        buffers.take((9000,), "u1")


CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def note(array):
    """Keep a weak reference to an array on its worker, and collect no garbage."""
    gc.disable()
    worker = get_worker()
    worker.noted = [*getattr(worker, "noted", ()), weakref.ref(array)]


def alive(dask_worker):
    noted = getattr(dask_worker, "noted", ())
    return len(noted), all(ref() is None for ref in noted)


def check_all_is_gone(client):
    frames = {}

    def all_is_gone():
        frames.update(client.run(alive))
        assert sum(noted for noted, _ in frames.values()), "something was noted"
        return all(gone for _, gone in frames.values())

    wait_until(all_is_gone, state=lambda: frames)


def failing_rank(ctx, x):
    array = np.ones(1000)
    note(array)
    ctx.barrier()
    if ctx.rank == 1:
        raise ZeroDivisionError("on purpose")
    ctx.barrier()


def failing(block):
    array = block + 1
    note(array)
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    "build",
    [
        lambda x: spmd(failing_rank, x, ranks=2),
        lambda x: map_overlap(failing, x, depth=1, boundary=0, meta=x._meta),
    ],
    ids=["a rank", "a task of a layer"],
)
def test_of_a_function_that_raises(client, build):
    future = client.compute(build(da.zeros((4, 1000), chunks=(2, 500))))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        result_of(client, future)
    del future
    check_all_is_gone(client)


def test_of_a_rank_whose_peer_dies(client, tmp_path):
    def function(ctx, x, path):
        array = np.ones(1000)
        note(array)
        ctx.barrier()
        if ctx.rank == 1 and not path.exists():
            path.touch()
            os._exit(1)
        ctx.barrier()
        return x + 1

    y = spmd(function, da.zeros(4, chunks=2), ranks=2, path=tmp_path / "died")
    assert np.array_equal(y.compute(), np.ones(4))
    check_all_is_gone(client)


def raising():
    array = np.ones(3)
    reference = weakref.ref(array)
    try:
        try:
            raise OSError("cause")
        except OSError as exc:
            raise TransferError("failed") from exc
    except TransferError as exc:
        return exc, reference


def test_an_exception_that_is_kept_has_no_frames():
    exc, array = raising()
    assert array() is not None
    assert without_frames(exc) is exc
    assert array() is None
    assert str(exc) == "failed"
    assert exc.__traceback__ is exc.__cause__ is exc.__context__ is None


def lookup(settings):
    return settings["rate"]


def looking_up(ctx, x):
    ctx.barrier()
    return x * lookup({}) if ctx.rank else ctx.allreduce(x)


FAILING = {
    "section": lambda x: spmd(looking_up, x, ranks=2),
    "steps": lambda x: iterate(lambda u: {"u": lookup({})}, {"u": x}, 1, 3)["u"],
    "halo": lambda x: map_overlap(lambda u: lookup({}), x, depth=1, boundary=0, meta=x._meta),
    "gang": lambda x: fused(x.map_blocks(lambda u: lookup({}), meta=x._meta) + 1, ranks=2),
}


@pytest.mark.parametrize("build", FAILING.values(), ids=FAILING)
def test_the_traceback_has_the_frames_of_the_program(client, build):
    """And none of this package before them, on the client and in the logs of workers."""
    with pytest.raises(KeyError, match="rate") as raised:
        build(da.ones((4, 4), chunks=(2, 4))).compute()
    frames = extract_tb(raised.value.__traceback__)
    assert frames[-1].name == "lookup"
    assert not [frame for frame in frames if "/dask_p2p/" in frame.filename]
    assert "/dask_p2p/" not in "".join(format_exception(raised.value))


def test_an_error_about_the_program_has_no_other_frames(client):
    def differing(ctx, x):
        return x + (ctx.allreduce(1.0) if ctx.rank else ctx.barrier())

    x = da.ones((4, 4), chunks=(2, 4))
    with pytest.raises(SectionError) as raised:
        spmd(differing, x, ranks=2).compute()
    assert extract_tb(raised.value.__traceback__)[-1].name == "differing"
    with pytest.raises(BlockMismatchError) as raised:
        iterate(lambda u: u[5:], {"u": x}, 1, 3)["u"].compute()
    assert "/dask_p2p/" not in "".join(format_exception(raised.value))


def test_faults_of_this_package_keep_their_frames():
    """Their reports need all frames."""
    with pytest.raises(TypeError) as raised:
        drops_frames(block_bounds)(None)
    _, *names = (frame.name for frame in extract_tb(raised.value.__traceback__))
    assert names == ["run", "block_bounds"]
