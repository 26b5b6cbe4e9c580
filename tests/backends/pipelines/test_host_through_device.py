"""NumPy blocks that a GPU permutes, without one: every access after those before it, and bounds."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p.backends
from dask_p2p.backends.base import SLOTS
from dask_p2p.backends.host.pinned import Pinned
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines import host_through_device as module
from dask_p2p.backends.pipelines.host_streams import HostStreams
from dask_p2p.backends.pipelines.host_through_device import (
    HostThroughDeviceQueue,
    is_for_device,
    part_bytes,
    slots_bytes,
)
from dask_p2p.errors import BlockMismatchError
from tests.backends.support import DTYPES, bits, permutations, random_bits
from tests.simulation.streams import HOST, Event, RaceError, Stream, drop_host_slots, emulated

PART_BYTES = 1024
ROWS, COLUMNS = 128, 8  # a part is 16 rows, which in the output are as long as copy engines take


def pinned(values):
    memory = np.asarray(Pinned(values.nbytes))[: values.nbytes]
    array = memory.view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def source(gpu, values, is_pinned=False):
    array = pinned(values) if is_pinned else values.copy()
    gpu.do(HOST, "the producer", writes=[array])
    return array


def values(number=0):
    return np.arange(ROWS * COLUMNS, dtype="f8").reshape(ROWS, COLUMNS) + 1000 * number


def queue_of(said=None, size_bytes=PART_BYTES):
    return HostThroughDeviceQueue(NUMPY, size_bytes, lambda *words: said.append(words))


def assembled(gpu, pinned_in=False, pinned_out=False, said=None, by_gpu=True):
    """A block that is made of two regions, one of which is dropped at once, and of a rim."""
    queue = queue_of(said)
    assert queue.pinned_output
    out = np.zeros((COLUMNS, 2 * ROWS + 1))
    out = pinned(out) if pinned_out else out
    queue.permute(out[:, :ROWS], source(gpu, values(), pinned_in), (1, 0), concurrent=True)
    queue.fill(out[:, 2 * ROWS :], np.full((), 7.0))
    gpu.do(HOST, "fill", writes=[out[:, 2 * ROWS :]])
    queue.permute_and_drop(out[:, ROWS : 2 * ROWS], source(gpu, values(1)[::-1], pinned_in), (1, 0))
    gc.collect()
    queue.synchronize()
    if by_gpu:
        gpu.do(HOST, "whoever reads the output", reads=[out])
    gpu.check()
    expected = [values().T, values(1)[::-1].T, np.full((COLUMNS, 1), 7.0)]
    return out, np.concatenate(expected, axis=1)


@pytest.mark.parametrize("pinned_out", [False, True])
@pytest.mark.parametrize("pinned_in", [False, True])
def test_all_is_done_in_order(gpu, pinned_in, pinned_out):
    for _ in range(2):  # with slots that are used again
        np.testing.assert_array_equal(*assembled(gpu, pinned_in, pinned_out))
        gc.collect()
    host_slots = len(gpu.pinned)
    assert host_slots == (0 if pinned_in and pinned_out else 1)
    assert gpu.pageable_copies == 0
    drop_host_slots()
    gc.collect()
    assert gpu.pinned == {}
    gpu.check()


@given(
    shape_and_axes=permutations(max_side=9, max_ndim=4),
    dtype=st.sampled_from([d for d in DTYPES if is_for_device("gpu", 1, d)]),
    pins=st.tuples(st.booleans(), st.booleans()),
    is_reversed=st.booleans(),
)
def test_any_region_of_any_dtype_bit_for_bit(shape_and_axes, dtype, pins, is_reversed):
    shape, axes = shape_and_axes
    with pytest.MonkeyPatch.context() as patch:
        gpu = emulated(patch)
        # Words of 8 bytes are recorded: items that share one are written by different streams.
        patch.setattr(gpu, "access", lambda *args: None)
        src = source(gpu, random_bits(shape, dtype), pins[0])
        if is_reversed:
            src = src[(*[slice(None, None, -1)] * len(shape), ...)]
        out = random_bits([shape[axis] for axis in axes], dtype)
        out = pinned(out) if pins[1] else out
        queue = queue_of()
        queue.permute(out, src, axes)
        queue.synchronize()
        assert bits(out) == bits(src.transpose(axes))
        assert gpu.most_bytes <= 2 * SLOTS * PART_BYTES


def test_what_does_not_fit_is_refused(gpu):
    with pytest.raises(BlockMismatchError, match=r"Expected a target of shape \(3, 2\)"):
        queue_of().permute(np.zeros((2, 3)), np.zeros((2, 3)), (1, 0))


def test_without_memory_of_the_device_the_cpu_does_it(gpu):
    gpu.limit_bytes = 1000
    said = []
    np.testing.assert_array_equal(*assembled(gpu, said=said, by_gpu=False))
    (words,) = said
    assert words[0] == "its GPU is out of memory"
    assert words[2] == "Its CPU permutes NumPy blocks."
    assert gpu.pinned == {}


def test_a_kernel_that_fails_leaves_nothing_behind(gpu, monkeypatch):
    queue, done = queue_of(), []
    kernels = dask_p2p.backends.kernels.permute
    real = kernels.permute_into

    def fails(*args, **kwargs):
        if len(done) == SLOTS + 1:
            raise KeyError("of the driver")
        done.append(real(*args, **kwargs))

    monkeypatch.setattr(kernels, "permute_into", fails)
    src, out = source(gpu, values(), True), pinned(np.zeros((COLUMNS, ROWS)))
    with pytest.raises(KeyError):
        queue.permute(out, src, (1, 0))
    queue.synchronize()
    gpu.do(HOST, "whoever gets the memory next", writes=[out, src])
    queue.synchronize()
    del out, src
    HostStreams.drop_slots()
    drop_host_slots()
    gc.collect()
    assert gpu.pinned == {}
    assert gpu.live_bytes == 0
    gpu.check()


@pytest.mark.parametrize(
    ("left_out", "pins"),
    [
        ("run waits for up", (True, True)),
        ("down waits for run", (True, True)),
        ("a slot waits for its part", (True, True)),
        ("a slot waits for its part", (False, False)),
        ("the end", (True, True)),
        ("the source is kept", (True, True)),
    ],
    ids=str,
)
def test_without_its_order_a_race_is_found(gpu, monkeypatch, left_out, pins):
    """So the tests above would fail if the queue lost one of these."""
    if left_out == "the end":
        monkeypatch.setattr(HostStreams, "synchronize", lambda self: None)
        nothing_down_is_waited_for(monkeypatch)
    elif left_out == "a slot waits for its part":
        nothing_down_is_waited_for(monkeypatch)
    elif left_out == "the source is kept":
        kept = module._UnderWay
        monkeypatch.setattr(module, "_UnderWay", lambda source, *others: kept(None, *others))
    else:
        wait, name = Stream.wait_event, left_out.partition(" ")[0]
        stream = HostStreams(None).streams[name]

        def wait_event(self, event):
            if self.name != stream.name:
                wait(self, event)

        monkeypatch.setattr(Stream, "wait_event", wait_event)
    with pytest.raises(RaceError):
        assembled(gpu, *pins)


def nothing_down_is_waited_for(monkeypatch):
    record, synchronize, down = Event.record, Event.synchronize, HostStreams(None).streams["down"]

    def noted(event, stream):
        event.stream = stream
        record(event, stream)

    monkeypatch.setattr(Event, "record", noted)
    monkeypatch.setattr(
        Event, "synchronize", lambda event: event.stream is down or synchronize(event)
    )


@given(st.integers(2**15, 2**40))
def test_slots_on_both_sides_take_a_quarter_of_the_limit_at_most(limit_bytes):
    assert 2 * slots_bytes(limit_bytes) <= limit_bytes // 4
    assert part_bytes(limit_bytes) % 512 == 0
    assert 512 <= part_bytes(limit_bytes) <= 2**24
