"""Regions between GPUs: values, and the order of all accesses of memory."""

import gc
import json
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.errors import SectionError, TransferError
from dask_p2p.geometry import block_bounds, box_slices, split_evenly
from dask_p2p.plans.ranks import ORDERS, Exchange, RankGrid
from dask_p2p.sections.exchange.redistribution import MOST_PIECES, Partitions, Pieces
from dask_p2p.sections.exchange.regions import ExchangeCall, RegionExchange
from dask_p2p.sections.gpu.windows import OwnEvents, PeerMemory
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports import cuda_ipc
from tests.sections.emulated import emulated_gpu, run_on_gpus, with_ucx
from tests.sections.exchange.test_redistribution import cases
from tests.sections.gangs import connections_of
from tests.simulation.streams import Event, drop_queue_slots
from tests.support import noted, pairwise, tune

X = np.random.default_rng(0).normal(size=(48, 40))
SLABS = RankGrid(((10, 14, 12, 12), (40,)), (4, 1))
PAIR = RankGrid(((20, 28), (40,)), (2, 1))
PART_BYTES = 512  # several parts of a region, in turns through the same slots


@pytest.fixture(autouse=True)
def _in_place(monkeypatch):
    """No array is small enough for windows."""
    tune(monkeypatch, window_bytes=0)


@pytest.fixture
def through_host(monkeypatch):
    """For each exchange through the host: the rank, and its receivers and sources of regions."""

    def ranks_of(exchange, call, regions, targets):
        return connections_of(exchange).rank_and_size[0], sorted(regions), sorted(targets)

    return noted(monkeypatch, RegionExchange, "give", ranks_of)


def filled(gpu, values):
    """Return an array that the function's stream writes; no stream waits for it."""
    return overwritten(gpu, gpu.empty(values.shape, values.dtype), values)


def overwritten(gpu, array, values):
    gpu.do(gpu.current[-1].name, "the function", writes=[array])
    array.values[...] = values
    return array


def run(gpu, ranks, function, part_bytes=PART_BYTES, **kwargs):
    """Call a function of a context and its local block of `X` on each rank, as sections do."""

    def with_local_block(ctx):
        function(ctx, X[box_slices(ctx.box)])

    run_on_gpus(gpu, ranks, with_local_block, part_bytes=part_bytes, **kwargs)


def there_and_back(gpu, ctx, local_block, times=2, **kwargs):
    """Transpose a local block and back; overwrite each array as soon as that is permitted."""
    turned = X.T[box_slices(ctx.box_of((0,), X.T.shape))]
    for number in range(times):
        a = filled(gpu, local_block + number)
        b = ctx.redistribute(a, (0,), axes=(1, 0), **kwargs)
        overwritten(gpu, a, -1)
        b = b.apply(lambda values: 2 * values)
        c = ctx.redistribute(b, from_partition=(0,), axes=(1, 0), out=a, **kwargs)
        overwritten(gpu, b, b.values + 1)
        assert np.array_equal(c.get(), 2 * (local_block + number))
        assert np.array_equal(b.get(), 2 * (turned + number) + 1)


def in_pieces(gpu, ranks, ctx, own, axis=0, count=3):
    """Transpose a local block made piece by piece; overwrite its pieces as soon as permitted."""
    bounds, pieces = block_bounds(split_evenly(own.shape[axis], count)), []

    def make(number):
        piece = own[(slice(None),) * axis + (slice(bounds[number], bounds[number + 1]),)]
        pieces.append(filled(gpu, np.ascontiguousarray(piece)))
        return pieces[-1]

    local_block = Pieces(own.dtype, axis, bounds, make)
    partitions = Partitions(ranks, ctx.rank, connections_of(ctx), device=ctx.device)
    out = partitions.redistribution((0,), axes=(1, 0))(local_block)
    for piece in pieces:
        overwritten(gpu, piece, -1)
    assert len(pieces) == count
    assert np.array_equal(out.get(), X.T[box_slices(ctx.box_of((0,), X.T.shape))])


@pytest.mark.parametrize(
    ("ranks", "count", "has_windows", "axis", "part_bytes"),
    pairwise(
        [PAIR, SLABS, RankGrid(((48,), (40,)), (1, 1))],
        [1, 3, MOST_PIECES],
        [True, False],
        [0, 1],
        [0, PART_BYTES],
    ),
)
def test_pieces(gpu, through_host, ranks, count, has_windows, axis, part_bytes):
    turned = partial(in_pieces, gpu, ranks, axis=axis, count=count)
    run(gpu, ranks, turned, part_bytes, has_windows=has_windows)
    calls = 0 if has_windows or ranks.size == 1 else ranks.size
    assert len(through_host) == calls
    assert all(sends and receives for _, sends, receives in through_host)


@pytest.mark.parametrize("window_bytes", [0, 2**26])
@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    permuted=st.booleans(),
    part_bytes=st.sampled_from([0, 16, 2**12]),
    dtype=st.sampled_from(["f8", "c8", "i8"]),  # one word each, like recorded accesses
)
def test_any_partition_of_any_array(window_bytes, case, permuted, part_bytes, dtype):
    ranks, (partition, new_partition), axes, _ = case
    shape = tuple(map(sum, ranks.chunks))
    x = (np.arange(np.prod(shape, dtype=int)) % 120).reshape(shape).astype(dtype)
    y = x.transpose(axes) if permuted else x
    order = {"axes": axes} if permuted else {}

    def to_another(gpu, ctx):
        for _ in range(3):  # through all slots of windows
            a = filled(gpu, x[box_slices(ctx.box_of(partition))])
            b = ctx.redistribute(a, new_partition or [0], partition, **order)
            overwritten(gpu, a, 1)
            assert np.array_equal(b.get(), y[box_slices(ctx.box_of(new_partition or [0], y.shape))])

    with pytest.MonkeyPatch.context() as patched:
        tune(patched, window_bytes=window_bytes)
        gpu = emulated_gpu(patched)
        run_on_gpus(gpu, ranks, partial(to_another, gpu), part_bytes=part_bytes)


@pytest.mark.parametrize("window_bytes", [0, 2**26])
def test_views_of_any_strides_are_read(gpu, through_host, in_place, monkeypatch, window_bytes):
    tune(monkeypatch, window_bytes=window_bytes)

    def reversed_and_spread(ctx, local_block):
        a = filled(gpu, np.repeat(local_block, 2, axis=1))[::-1, ::-2]
        b = ctx.redistribute(a, (1,))
        expected = np.concatenate([X[:20][::-1, ::-1], X[20:][::-1, ::-1]])
        assert np.array_equal(b.get(), expected[box_slices(ctx.box_of((1,)))])

    run(gpu, PAIR, reversed_and_spread)
    assert not through_host
    assert len(in_place) == (0 if window_bytes else 2)


def test_what_was_opened_is_closed_and_slots_go(gpu, monkeypatch):
    runtime = gpu.cupy.cuda.runtime
    events = noted(monkeypatch, runtime, "ipcOpenEventHandle", lambda handle: handle)
    monkeypatch.setattr(runtime, "eventDestroy", lambda event: events.pop())
    run(gpu, PAIR, partial(there_and_back, gpu))
    assert not events
    gpu.mappings.close()
    assert len(gpu.mappings) == 0, "no rank uses one"
    drop_queue_slots()
    gc.collect()
    assert not gpu.live_bytes
    gpu.check()


# --- memory that cannot be read goes through the host

OF_THE_SECOND = [(0, [], [1]), (1, [0, 2, 3], []), (2, [], [1]), (3, [], [1])]


def to_columns(gpu, ctx, local_block):
    b = ctx.redistribute(filled(gpu, local_block), (1,))
    assert np.array_equal(b.get(), X[box_slices(ctx.box_of((1,)))])


def test_ranks_of_other_hosts(gpu, through_host, two_hosts):
    run(gpu, SLABS, partial(there_and_back, gpu, times=1))
    far_ranks = {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}
    assert len(through_host) == 8
    assert all(sends == receives == far_ranks[rank] for rank, sends, receives in through_host)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_of_other_hosts_by_ucx(gpu, through_host, monkeypatch, order):
    """From memory of the GPU: no region goes through host memory."""
    messenger = with_ucx(gpu, monkeypatch)
    run(gpu, SLABS, partial(there_and_back, gpu, times=2, exchange=order))
    assert not through_host
    assert len(messenger.sent) == 4 * 4 * 2
    assert not messenger.waiting


def test_small_regions_for_other_hosts(gpu, through_host, monkeypatch):
    """Regions of 12 x 14 or 10 x 12 elements, and less: some by UCX, the rest through the host."""
    messenger = with_ucx(gpu, monkeypatch)
    tune(monkeypatch, ucx_message_bytes=110 * 8)
    run(gpu, SLABS, partial(there_and_back, gpu, times=1))
    sent = sum(len(sends) for _, sends, _ in through_host)
    assert 0 < sent < 2 * 4 * 2
    assert len(messenger.sent) + sent == 2 * 4 * 2


def fail_on_rank(monkeypatch, target, name, rank):
    """Make one call of CUDA IPC fail on one rank."""
    original = getattr(target, name)

    def refuses(instance, device, *args):
        if connections_of(device).rank_and_size[0] == rank:
            raise RuntimeError("cudaErrorNotSupported")
        return original(instance, device, *args)

    monkeypatch.setattr(target, name, refuses)


@pytest.mark.parametrize("target", [OwnEvents, PeerMemory])
def test_a_rank_without_shared_events(gpu, through_host, monkeypatch, target):
    fail_on_rank(monkeypatch, target, "__init__", 2)
    run(gpu, SLABS, partial(there_and_back, gpu, times=1))
    for rank, sends, receives in through_host:
        assert sends == receives == ([0, 1, 3] if rank == 2 else [2])


@pytest.mark.parametrize("call", ["exported", "mapped"])
def test_memory_that_cannot_be_shared(gpu, through_host, monkeypatch, call):
    """For example, the region has memory of another allocator; the other ones are shared."""
    export, mapped = cuda_ipc.export, PeerMemory.mapped

    def fails_to_export(region):
        if region.shape[0] == 14:  # of the second rank's local block
            raise TransferError("managed memory")
        return export(region)

    def fails_to_map(instance, handle, spread_bytes):
        if spread_bytes == (13 * 40 + 10) * 8:  # from its first to its last row that others read
            raise TransferError("ipc: the memory cannot be mapped")
        return mapped(instance, handle, spread_bytes)

    if call == "exported":
        monkeypatch.setattr(cuda_ipc, "export", fails_to_export)
    else:
        monkeypatch.setattr(PeerMemory, "mapped", fails_to_map)
    run(gpu, SLABS, partial(to_columns, gpu))
    assert sorted(through_host) == OF_THE_SECOND


# --- the end of an attempt


def fail_second_rank(monkeypatch, word, number, pause_s=0.0):
    """Let a call of this number whose text ends with a word fail on the second rank."""
    original, calls = Connections.begin, []

    def begin(connections, call, *args):
        if call.endswith(word) and connections.rank_and_size[0] == 1:
            calls.append(call)
            if len(calls) >= number:
                time.sleep(pause_s)
                raise OSError("no more")
        return original(connections, call, *args)

    monkeypatch.setattr(Connections, "begin", begin)


def test_a_rank_that_has_gone_ends_the_attempt(gpu, monkeypatch):
    """Work on the queues of the others ends before memory is freed."""
    fail_second_rank(monkeypatch, "descriptors", 3)
    with pytest.raises((OSError, AttemptEndedError)):
        run(gpu, SLABS, partial(there_and_back, gpu))
    gc.collect()
    gpu.check()


def test_regions_of_a_failed_attempt_stay_a_while(gpu, monkeypatch):
    """A rank that frees its local block cannot find out whether another one still reads it."""

    def gives_up(ctx, local_block):
        a = filled(gpu, local_block)
        with suppress(OSError):
            ctx.redistribute(a, (1,))
            return
        del a
        gc.collect()
        gpu.check()
        raise OSError("no more")

    # The other rank puts reads on its queue meanwhile.
    fail_second_rank(monkeypatch, "read", 1, pause_s=0.2)
    with pytest.raises((OSError, AttemptEndedError)):
        run(gpu, PAIR, gives_up)


@pytest.mark.parametrize("window_bytes", [0, 2**26])
def test_calls_that_differ_are_found(gpu, monkeypatch, window_bytes):
    tune(monkeypatch, window_bytes=window_bytes)

    def differing(ctx, local_block):
        order = ["pairwise", "diagonal"][ctx.rank]
        ctx.redistribute(filled(gpu, local_block), (1,), exchange=order)

    with pytest.raises(SectionError, match=r"redistribute\(\).*pairwise.* on rank 0"):
        run(gpu, PAIR, differing)


# --- events


class Counted(list):
    """The numbers of waits for events that were recorded more or less often than the own event."""

    patience_s = 0.02  # time for the first rank to record an event again before a wait for it


@pytest.fixture
def counted(monkeypatch):
    original, wait = Event.record, PeerMemory.wait
    own_of, device_of, rank_of, events_of, errors = {}, {}, {}, {}, Counted()

    def record(event, stream):
        event.count = getattr(event, "count", 0) + 1
        original(event, stream)

    make = OwnEvents.__init__

    def make_noted(instance, device, count):
        make(instance, device, count)
        own_of[device] = instance.events

    def slowly(peer, stream, number):
        event = stream.recorder.events[events_of[peer][number]]
        own = own_of[device_of[peer]][number]
        until_s = time.monotonic() + errors.patience_s * (rank_of[peer] == 0)
        while event.count == own.count and time.monotonic() < until_s:
            time.sleep(0.002)
        if event.count != own.count:
            errors.append(number)
            errors.patience_s = 0
        wait(peer, stream, number)

    opened = PeerMemory.__init__

    def with_events(peer, device, descriptor):
        opened(peer, device, descriptor)
        device_of[peer], rank_of[peer] = device, connections_of(device).rank_and_size[0]
        handles = map(bytes.fromhex, json.loads(descriptor)["events"])
        events_of[peer] = [*map(device.module.cuda.runtime.ipcOpenEventHandle, handles)]

    for target, name, value in (
        (Event, "record", record),
        (OwnEvents, "__init__", make_noted),
        (PeerMemory, "wait", slowly),
        (PeerMemory, "__init__", with_events),
    ):
        monkeypatch.setattr(target, name, value)
    return errors


def test_no_event_is_recorded_again_before_it_is_waited_for(gpu, counted):
    """The second rank reads from the first, then exchanges with the third, repeatedly."""
    moves = [({0: [1]}, {1: [0]}), ({1: [2], 2: [1]}, {1: [2], 2: [1]})]

    def function(ctx, local_block):
        regions = ctx.device.region_mover(connections_of(ctx), False)
        for number in range(6):
            gives, gets = moves[number % 2]
            a, out = filled(gpu, np.full((4, 20), number, "f8")), gpu.empty((4, 20), "f8")
            sends, receives = (
                {rank: [((0, 4), (0, 20))] for rank in side.get(ctx.rank, ())}
                for side in (gives, gets)
            )
            local_block = Exchange(a.shape, out.shape, (0, 1), [], [], sends, receives)
            call = ExchangeCall(f"call {number}", a.dtype, local_block, mean_elements=80)
            regions.bring(call, a, out)
            if ctx.rank in gets:
                assert np.array_equal(out.get(), np.full((4, 20), number))
        regions.settle()

    run(gpu, RankGrid(((16, 16, 16), (40,)), (3, 1)), function)
    assert not counted
