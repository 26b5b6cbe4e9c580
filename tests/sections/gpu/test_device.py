"""Ranks with local blocks on a GPU: data that goes through the host, waits, and messages."""

import gc
import threading
import time
from functools import partial
from types import SimpleNamespace
from weakref import ref

import dask.array as da
import numpy as np
import pytest

from dask_p2p import errors, estimate, iterate, spmd
from dask_p2p.backends import cupy as cupy_backend
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gpu import messages as module
from dask_p2p.sections.gpu import streams as gpu_streams
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.iterate import capture as overlap
from tests.sections.emulated import emulated_gpu, kernel, on_gpu, run_on_gpus, run_section
from tests.sections.gangs import connections_of
from tests.sections.gpu.test_regions import overwritten
from tests.sections.iterate.test_programs import X as LARGE
from tests.sections.iterate.test_programs import star
from tests.simulation.streams import Array
from tests.support import BOUND_S, noted, tune
from tests.transports.loopback import wait_until

X = np.random.default_rng(0).normal(size=(8, 6))


def array(gpu, x=X, chunks=(2, 3)):
    return on_gpu(gpu, da.from_array(x, chunks=chunks))


# --- whole sections


@pytest.mark.parametrize("returned", [np.ones((8, 6)), None, 3])
def test_what_is_no_array_of_the_device(gpu, returned):
    match = r"from the function.* got .*(numpy|builtins)\."
    for y in (
        spmd(lambda ctx, x: returned, array(gpu), ranks=1),
        iterate(lambda u: returned, array(gpu), 0, 1, ranks=1),
    ):
        with pytest.raises(errors.BlockMismatchError, match=match):
            run_section(gpu, y, [X])


def test_auto_hides_halos_of_other_ranks(gpu, monkeypatch):
    """But not of one host, or for small blocks: the function is called three times in a step."""
    # The emulated kernel records its calls. The second step computes the whole block, too.
    monkeypatch.setattr(overlap, "is_replayable", lambda function: True)
    calls = []

    def counted(u, out):
        calls.append(out.shape)
        out[:] = u[1:-1, 1:-1]

    often = 2 * (1 + 1 + 2 * 3)
    cases = (1, 0, False, 3), (2, LARGE.nbytes, False, 6), (2, 0, True, 6), (2, 0, False, often)
    for ranks, least_bytes, has_windows, count in cases:
        tune(monkeypatch, gpu_overlap_bytes=least_bytes)
        calls.clear()
        y = iterate(kernel(gpu, counted), array(gpu, LARGE, (12, 30)), 1, 3, ranks=ranks)
        run_section(gpu, y, [LARGE], device=partial(Gpu, has_windows=has_windows))
        assert len(calls) == count
    assert {*calls} == {(12, 30), (10, 30), (1, 30)}


# --- failures


def test_arrays_of_two_kinds(gpu):
    x, y = array(gpu), da.from_array(X, chunks=(2, 3))
    for first, second, title in ((x, y, "NumPy"), (y, x, "CuPy")):
        match = rf"got an array of {title}: .* x.map_blocks\(cupy.as"
        with pytest.raises(errors.UnsupportedArrayError, match=match):
            iterate(lambda u, v: u, (first, second), 0, 1)
        with pytest.raises(errors.UnsupportedArrayError, match=match):
            spmd(lambda ctx, u, v: u, first, second)
        with pytest.raises(errors.UnsupportedArrayError, match=f"got a constant of {title}"):
            iterate(lambda u, c: u, first, 0, 1, constants=(second,))
    match = r"a constant of NumPy.* cupy.asarray\(x\)"
    with pytest.raises(errors.UnsupportedArrayError, match=match):
        iterate(lambda u, c: u, x, 0, 1, constants=(np.ones(3),))
    iterate(lambda u, c: u, x, 0, 1, constants=(np.float64(2), 3, "c"))


def test_blocks_of_another_kind_than_declared(gpu):
    y = spmd(lambda ctx, x: x, da.from_array(X, chunks=-1).map_blocks(gpu.written, meta=X[:0, :0]))
    match = r"block .*: expected an array of numpy, .*cupy.asnumpy"
    with pytest.raises(errors.InputError, match=match):
        y.compute(scheduler="sync")


def test_what_does_not_fit_into_the_gpu_is_refused(gpu, monkeypatch):
    y = iterate(kernel(gpu, star), array(gpu), 1, 2, ranks=1)
    total_bytes = estimate(y).total_bytes
    monkeypatch.setattr(cupy_backend, "_total_bytes", lambda device: total_bytes - 1)
    with pytest.raises(errors.MemoryLimitError, match=r"fits into .* of the GPU of this process"):
        run_section(gpu, y, [X])
    monkeypatch.setattr(cupy_backend, "_total_bytes", lambda device: total_bytes)
    run_section(gpu, y, [X])


def test_a_gpu_that_waits_for_a_lost_rank(gpu, monkeypatch):
    """Its wait cannot be cancelled: the process has to end."""
    tune(monkeypatch, lost_gpu_s=0.05)
    connections = SimpleNamespace(has_ended=False, is_alone=True)
    device = Gpu(connections)
    query_results, waited = iter([600, 600, 0]), []

    def run():
        with device.running([]):
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: next(query_results)
            device.wait()  # for a long kernel, in an attempt that continues
            waited.append(device)
            connections.has_ended = True
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: 600

    with pytest.raises(errors.DeviceLostError, match=r"has waited 0\.05 s for a lost rank"):
        run()
    assert waited
    gpu.cupy.cuda.runtime.streamQuery = lambda stream: 0
    with (second_gpu := Gpu()).running([]):
        assert second_gpu.stream is not device.stream, "which no other device uses"


@pytest.mark.parametrize("ended", [(True, True), (True, False)])
def test_windows_of_an_attempt_go_with_the_last_process_that_read_them(gpu, ended):
    """The next attempt may need their memory."""
    device = Gpu()
    device.peers.extend(SimpleNamespace(has_ended=has_ended) for has_ended in ended)
    device.exported.append(gpu.empty((100,), "f8"))
    used = gpu.live_bytes
    device.let_go(is_orderly=False)
    if not all(ended):
        time.sleep(3 * gpu_streams._LOOK_S)
        assert gpu.live_bytes == used
        device.peers[1].has_ended = True
    wait_until(lambda: gpu.live_bytes < used)


def test_streams_outlive_memory_of_a_function_that_raised(monkeypatch):
    """RMM frees memory on its stream. The garbage collector could drop the stream before."""
    runtime, queues = emulated_gpu(monkeypatch).cupy.cuda.runtime, []

    def work(error=None, query=lambda stream: 0):
        device = Gpu()
        with device.running([]):
            queues.append(ref(device.queue))
            runtime.streamQuery = query
            if error is not None:
                raise error

    def lost(stream):
        raise ValueError("the GPU is lost")

    with pytest.raises(ValueError, match="no more"):
        work(ValueError("no more"))
    with pytest.raises(ValueError, match="the GPU is lost"):
        work(query=lost)
    work()
    gc.collect()
    of_first, of_second, of_third = (queue() for queue in queues)
    assert of_first is of_second, "with its streams"
    assert None not in (of_second, of_third)
    assert of_third is not of_second, "no device gets its streams any more"


RANKS, PAIR = (RankGrid(((1,) * size,), (size,)) for size in (3, 2))
SHAPE = 6, 8


@pytest.fixture(autouse=True)
def _lent(monkeypatch):
    tune(monkeypatch, lent_message_bytes=64)


@pytest.fixture
def downloads(monkeypatch):
    """For each value that is copied to host memory, whether it is an array of the GPU."""
    return noted(monkeypatch, Gpu, "to_host", Gpu.holds)


def values_of(rank, round_number=0):
    return np.arange(48.0).reshape(SHAPE) + 100 * rank + 1000 * round_number


def ring(ctx):
    return {"dest": (ctx.rank + 1) % ctx.size, "source": (ctx.rank - 1) % ctx.size}


def around(gpu, ctx, turns=4, has_out=False):
    """Send the same array around, which changes after each message; return the values."""
    message, received_arrays = gpu.empty(SHAPE, float), []
    for round_number in range(turns):
        overwritten(gpu, message, values_of(ctx.rank, round_number))
        out = gpu.empty(SHAPE, float) if has_out else None
        received_array = ctx.sendrecv(message, **ring(ctx), out=out)
        assert isinstance(received_array, Array)
        assert out is None or received_array is out
        received_arrays.append(received_array)
        overwritten(gpu, message, -1.0)
    ctx.device.stream.synchronize()
    return [*map(gpu.read, received_arrays)]


def check_around(received_array):
    for rank, arrays in enumerate(received_array):
        for round_number, array in enumerate(arrays):
            np.testing.assert_array_equal(array, values_of((rank - 1) % 3, round_number))


@pytest.mark.parametrize("has_out", [False, True])
def test_arrays_go_from_gpu_to_gpu(gpu, downloads, has_out):
    """The sender writes into its array as soon as the call has returned."""
    check_around(run_on_gpus(gpu, RANKS, lambda ctx: around(gpu, ctx, has_out=has_out)))
    assert not any(downloads)


def test_a_sender_that_cannot_open_events_needs_none(gpu, monkeypatch, downloads):
    """The receiver's host waits for its copies then, in each message."""
    original = module.MessageLender.acknowledged

    def acknowledged(self, rank, count, acknowledgement):
        self._unreadable.add(rank)
        self._near.pop(rank, None)
        original(self, rank, count, acknowledgement)

    monkeypatch.setattr(module.MessageLender, "acknowledged", acknowledged)
    check_around(run_on_gpus(gpu, RANKS, partial(around, gpu)))
    assert not any(downloads)


def test_values_of_several_arrays(gpu, downloads):
    """Of both kinds of memory, in both orders, with numbers and empty arrays between them."""

    def program(ctx):
        message = {
            "host": np.arange(100),
            "c": gpu.written(values_of(ctx.rank)),
            "f": gpu.written(values_of(ctx.rank)).transpose(),
            "rank": ctx.rank,
            "empty": gpu.written(np.zeros((0, 3), "f4")),
            "part": (
                gpu.written(values_of(ctx.rank))[1:, ::2],
                gpu.written(np.arange(5, dtype="i2")),
            ),
            "a long name that no header has room for": gpu.written(np.arange(7, dtype="u1")),
        }
        received = ctx.sendrecv(message, **ring(ctx))
        source = ring(ctx)["source"]
        assert [*received] == [*message]
        assert received["rank"] == source
        np.testing.assert_array_equal(received["host"], np.arange(100))
        assert (received["empty"].shape, received["empty"].dtype) == ((0, 3), np.dtype("f4"))
        ctx.device.wait()
        expected = values_of(source)
        pairs = (
            (received["c"], expected),
            (received["f"], expected.T),
            (received["part"][0], expected[1:, ::2]),
            (received["part"][1], np.arange(5)),
            (received["a long name that no header has room for"], np.arange(7)),
        )
        for array, original in pairs:
            assert isinstance(array, Array)
            np.testing.assert_array_equal(gpu.read(array), original)
        assert received["f"].flags.f_contiguous

    run_on_gpus(gpu, RANKS, program)
    assert not any(downloads)


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("refuses", ["windows", "receiver", "sender"])
def test_unreadable_arrays_are_sent(gpu, monkeypatch, downloads, refuses, has_out):
    """`ipc` is not in the order of transports, a rank cannot open memory, or export it."""

    def fail(*args):
        raise errors.TransferError("no")

    if refuses == "receiver":
        monkeypatch.setattr(module, "PeerMemory", fail)
    if refuses == "sender":
        monkeypatch.setattr(module, "OwnEvents", fail)
    windows = refuses != "windows"
    program = partial(around, gpu, turns=2, has_out=has_out)
    check_around(run_on_gpus(gpu, RANKS, program, has_windows=windows))
    assert sum(downloads) == 6


def test_a_sender_that_has_returned(gpu, monkeypatch, downloads):
    """It does not wait for its message, which is received later. Its memory stays until then.

    It opens no events of the receiver, as it would not close them.
    """
    returned, events = threading.Event(), []

    def rank_of(device, descriptor):
        return connections_of(device).rank_and_size[0]

    opened = noted(monkeypatch, module, "PeerMemory", rank_of)

    def program(ctx):
        if ctx.rank == 1:
            events.append(returned.wait(BOUND_S))
            received = ctx.recv(0), ctx.recv(0)
            ctx.device.stream.synchronize()
            return [*map(gpu.read, received)]
        for round_number in range(2):
            ctx.isend(gpu.written(values_of(0, round_number)), 1)
        ctx.device.closing.insert(0, returned.set)  # called last
        return []

    received = run_on_gpus(gpu, PAIR, program)[1]
    assert (events, opened) == ([True], [1])
    for round_number, array in enumerate(received):
        np.testing.assert_array_equal(array, values_of(0, round_number))
    assert not any(downloads)


def test_a_receiver_that_has_returned_opens_nothing(gpu, monkeypatch):
    """Its streams and its closing functions are gone. The message is named as not received."""
    opened, returned = [], threading.Event()
    monkeypatch.setattr(module, "PeerMemory", lambda *args: opened.append(args))

    def program(ctx):
        if ctx.rank == 0:
            assert returned.wait(BOUND_S)
            ctx.isend(gpu.written(values_of(0)), 1)
        else:
            ctx.device.closing.insert(0, returned.set)  # called last

    with pytest.raises(errors.SectionError, match="expected rank 1 to receive all messages"):
        run_on_gpus(gpu, PAIR, program)
    assert not opened


def test_messages_of_communicators_and_collective_calls(gpu, downloads):
    def program(ctx):
        line = ctx.along(0)
        to_all = ctx.bcast(gpu.written(values_of(1)) if ctx.rank == 1 else None, root=1)
        parts = ctx.alltoall([gpu.written(values_of(ctx.rank, to)) for to in range(3)])
        before, after = (line.rank - 1) % 3, (line.rank + 1) % 3
        received = line.sendrecv(gpu.written(values_of(ctx.rank)), after, before)
        ctx.device.wait()
        np.testing.assert_array_equal(gpu.read(to_all), values_of(1))
        for rank, part in enumerate(parts):
            np.testing.assert_array_equal(gpu.read(part), values_of(rank, ctx.rank))
        np.testing.assert_array_equal(gpu.read(received), values_of(before))

    run_on_gpus(gpu, RANKS, program)
    assert not any(downloads)


@pytest.mark.parametrize(("op", "parted_bytes"), [("sum", 256), ("max", 256), ("sum", 2**20)])
def test_sums_of_all_ranks_stay_on_gpus(gpu, monkeypatch, downloads, op, parted_bytes):
    tune(monkeypatch, lent_message_bytes=64, parted_reduction_bytes=parted_bytes)

    def program(ctx):
        addend = gpu.written(values_of(ctx.rank) * (-1) ** ctx.rank)
        sums = [ctx.allreduce(addend, op) for _ in range(3)]
        ctx.device.stream.synchronize()
        return [gpu.read(array) for array in sums], gpu.read(addend)

    addends = [values_of(0), -values_of(1), values_of(2)]
    expected = addends[0] + addends[1] + addends[2] if op == "sum" else np.maximum.reduce(addends)
    for rank, (sums, addend) in enumerate(run_on_gpus(gpu, RANKS, program)):
        np.testing.assert_array_equal(sums, [expected] * 3)
        np.testing.assert_array_equal(addend, addends[rank])
    assert any(downloads) == (parted_bytes > 256), "small arrays go through the host"
