"""Arrays of GPUs in messages: values, and the order of all accesses of memory."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from dask_p2p.errors import SectionError, TransferError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gpu import messages as module
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import PeerMemory
from tests.sections.emulated import run_on_gpus
from tests.sections.gangs import connections_of
from tests.sections.gpu.test_regions import overwritten
from tests.simulation.streams import Array
from tests.support import BOUND_S, tune

RANKS, PAIR = (RankGrid(((1,) * size,), (size,)) for size in (3, 2))
SHAPE = 6, 8


@pytest.fixture(autouse=True)
def _lent(monkeypatch):
    tune(monkeypatch, lent_message_bytes=64)


@pytest.fixture
def downloads(monkeypatch):
    """The sizes of arrays that are copied to host memory."""
    copied_arrays, original = [], Gpu.to_host

    def noted(self, value):
        if self.holds(value):
            copied_arrays.append(value.nbytes)
        return original(self, value)

    monkeypatch.setattr(Gpu, "to_host", noted)
    return copied_arrays


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
    assert not downloads


def test_a_sender_that_cannot_open_events_needs_none(gpu, monkeypatch, downloads):
    """The receiver's host waits for its copies then, in each message."""
    original = module.MessageLender.acknowledged

    def acknowledged(self, rank, count, acknowledgement):
        self._unreadable.add(rank)
        self._near.pop(rank, None)
        original(self, rank, count, acknowledgement)

    monkeypatch.setattr(module.MessageLender, "acknowledged", acknowledged)
    check_around(run_on_gpus(gpu, RANKS, partial(around, gpu)))
    assert not downloads


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
    assert not downloads


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("refuses", ["windows", "receiver", "sender"])
def test_unreadable_arrays_are_sent(gpu, monkeypatch, downloads, refuses, has_out):
    """`ipc` is not in the order of transports, a rank cannot open memory, or export it."""

    def fail(*args):
        raise TransferError("no")

    if refuses == "receiver":
        monkeypatch.setattr(module, "PeerMemory", fail)
    if refuses == "sender":
        monkeypatch.setattr(module, "OwnEvents", fail)
    windows = refuses != "windows"
    program = partial(around, gpu, turns=2, has_out=has_out)
    check_around(run_on_gpus(gpu, RANKS, program, has_windows=windows))
    assert len(downloads) == 6


def test_a_sender_that_has_returned(gpu, monkeypatch, downloads):
    """It does not wait for its message, which is received later. Its memory stays until then.

    It opens no events of the receiver, as it would not close them.
    """
    returned, events, opened = threading.Event(), [], []

    def noted(device, descriptor):
        opened.append(connections_of(device).rank_and_size[0])
        return PeerMemory(device, descriptor)

    monkeypatch.setattr(module, "PeerMemory", noted)

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
    assert not downloads


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

    with pytest.raises(SectionError, match="expected rank 1 to receive all messages"):
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
    assert not downloads


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
    assert bool(downloads) == (parted_bytes > 256), "small arrays go through the host"
