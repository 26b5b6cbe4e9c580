"""In which order parts go through a GPU, without one: every access after those before it."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends import pipelines as part_streams
from dask_p2p.backends.base import SLOTS, HostLink
from dask_p2p.backends.cupy import CUPY, measure_host_link
from dask_p2p.backends.host_memory import Pinned
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines import HostStreams, PartStreams
from dask_p2p.plans.base import Input, Step, plan_parts, schedule_steps
from tests.simulation.streams import HOST, Event, RaceError, drop_host_slots, emulated
from tests.support import noted, pairwise

ROWS, COLUMNS = 4, 64  # of a part: as many bytes as allocations are aligned to
PARTS = 2 * SLOTS + 1
NEVER = 2**60


class Work:
    """Twice an array, part by part, or the sum of its parts."""

    def __init__(self, gpu, values, axis=0, is_reduced=False, in_place=False):
        self.gpu, self.axis, self.in_place, self.is_reduced = gpu, axis, in_place, is_reduced
        self.arrays = [values]
        gpu.do(HOST, "the producer", writes=[values])
        block = Input(values.shape, 8, axis)
        row_bytes = block.row_bytes * (ROWS if is_reduced else 1)
        length = values.shape[axis]
        part_bytes = ROWS * block.row_bytes
        self.plan = plan_parts([block], length, part_bytes, row_bytes, is_reduced)

    def views(self, part):
        (read,) = part.reads
        yield self.arrays[0][(slice(None),) * self.axis + (slice(*read),)]

    def output_slices(self, part):
        return () if self.is_reduced else (slice(None),) * self.axis + (slice(*part.output_range),)

    def call(self, part, inputs):
        (block,) = inputs
        name = self.gpu.current[-1].name
        if self.in_place:
            self.gpu.do(name, "the function", reads=[block], writes=[block])
            block.values[...] *= 2
            return block
        result = self.gpu.empty(block.shape, block.dtype)
        self.gpu.do(name, "the function", reads=[block], writes=[result])
        result.values[...] = 2 * block.values
        return result

    def combine(self, part, combined, result):
        if combined is None:
            return result
        name = self.gpu.current[-1].name
        self.gpu.do(name, "reduce", reads=[combined, result], writes=[result])
        result.values[...] += combined.values
        return result

    def expected(self):
        if not self.is_reduced:
            return 2 * self.arrays[0]
        return 2 * self.arrays[0].reshape(-1, ROWS, COLUMNS).sum(0)


def array(is_pinned=False, shape=(PARTS * ROWS, COLUMNS)):
    size_bytes = 8 * shape[0] * shape[1]
    memory = (
        np.asarray(Pinned(size_bytes))[:size_bytes].view("f8") if is_pinned else np.empty(shape)
    )
    memory = memory.reshape(shape)
    memory[...] = np.arange(memory.size).reshape(shape)
    return memory


def through(gpu, work, out, register_from_bytes=NEVER, warnings=None):
    streams = PartStreams(register_from_bytes, lambda *words: warnings.append(words))
    streams.run(work, out)
    gpu.do(HOST, "whoever reads the output", reads=[out])
    gpu.check()
    np.testing.assert_array_equal(out, work.expected())
    return streams.copied


@pytest.fixture
def staged(monkeypatch):
    """Sizes of the parts that threads copy into and out of pinned memory."""
    return [
        noted(monkeypatch, part_streams, name, lambda to, src: src.nbytes)
        for name in ("start_copy", "copy_on_host")
    ]


@pytest.mark.parametrize(
    ("pinned_in", "pinned_out", "axis", "in_place"),
    pairwise([False, True, "where it lies"], [False, True], [0, 1], [False, True]),
)
def test_all_is_done_in_order(gpu, staged, pinned_in, pinned_out, axis, in_place):
    for number in (1, 2):  # with slots that are used again
        x, out = array(pinned_in is True), array(pinned_out)
        work = Work(gpu, x, axis, in_place=in_place)
        copied = through(gpu, work, out, 1 if pinned_in == "where it lies" else NEVER)
        assert copied.up_bytes == copied.down_bytes == x.nbytes
        strides_reach = axis == 0  # runs along the other axis are too short for copy engines
        direct = strides_reach * (bool(pinned_in) + pinned_out)
        assert sum(map(sum, staged)) == number * (2 - direct) * x.nbytes
        assert gpu.pageable_copies == 0
        assert copied.run.groups == len(work.plan.parts)
        del x, out, work
    drop_host_slots()
    assert gpu.pinned == {}
    gpu.check()


@given(
    shape=st.tuples(st.integers(1, 30), st.sampled_from([1, 16, 40])),
    axis=st.integers(0, 1),
    rows=st.integers(1, 12),
    pins=st.tuples(st.booleans(), st.booleans()),
    in_place=st.booleans(),
)
def test_any_number_of_parts_of_any_size(shape, axis, rows, pins, in_place):
    with pytest.MonkeyPatch.context() as patch:
        gpu = emulated(patch)
        x, out = (array(is_pinned, shape) for is_pinned in pins)
        work = Work(gpu, x, axis, in_place=in_place)
        (block,) = work.plan.inputs
        work.plan = plan_parts([block], shape[axis], rows * block.row_bytes, block.row_bytes)
        assert len(work.plan.parts) == -(-shape[axis] // rows)
        through(gpu, work, out)
        assert gpu.most_bytes <= sum(work.plan.device_bytes(SLOTS)) + SLOTS * 512
        assert gpu.pageable_copies == 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("pinned_in", [False, True])
def test_results_of_parts_are_combined_in_order(gpu, pinned_in, in_place):
    work = Work(gpu, array(pinned_in), is_reduced=True, in_place=in_place)
    copied = through(gpu, work, np.empty((ROWS, COLUMNS)))
    assert copied.down_bytes == 8 * ROWS * COLUMNS


def test_the_function_comes_after_what_the_null_stream_does(gpu):
    weights = gpu.empty((1,), "f8")
    gpu.do("null", "a task before", writes=[weights])
    work = Work(gpu, array())
    call = work.call

    def with_weights(part, inputs):
        gpu.do(gpu.current[-1].name, "the function", reads=[weights])
        return call(part, inputs)

    work.call = with_weights
    through(gpu, work, array())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("pins", [(True, True), (True, False), (False, True), (False, False)])
def test_the_next_block_begins_in_the_same_slots(gpu, pins, in_place):
    """The second block begins as soon as it may."""
    first, then = (Work(gpu, array(is_pinned), in_place=in_place) for is_pinned in pins)
    out, begun = array(True), []

    @contextmanager
    def begin():
        through(gpu, then, array(True))
        begun.append(then)
        yield

    PartStreams(NEVER, pytest.fail, on_issued=begin).run(first, out)
    gpu.do(HOST, "whoever reads the output", reads=[out])
    gpu.check()
    assert begun == [then]
    np.testing.assert_array_equal(out, first.expected())
    assert gpu.most_bytes <= sum(first.plan.device_bytes(SLOTS)), "slots for one block, not for two"
    PartStreams.drop_slots()
    assert gpu.live_bytes == 0, "and none of the results is left"


def test_nothing_is_handed_on_where_threads_bring_the_last_part_home(gpu):
    streams = PartStreams(NEVER, pytest.fail, on_issued=lambda: pytest.fail("there is no need"))
    streams.run(Work(gpu, array(True)), array())


def test_a_function_that_fails_leaves_nothing_behind(gpu):
    work = Work(gpu, array(), in_place=True)
    call, fifth = work.call, work.plan.parts[4]

    def fails(part, inputs):
        if part == fifth:
            raise KeyError("of the user")
        return call(part, inputs)

    work.call = fails
    out = array(True)
    with pytest.raises(KeyError):
        PartStreams(1, None).run(work, out)
    gpu.do(HOST, "whoever gets the memory next", writes=[out, work.arrays[0]])
    del out
    PartStreams.drop_slots()
    drop_host_slots()
    gpu.check()
    assert gpu.pinned == {}


def test_without_memory_of_the_device_nothing_is_kept(gpu):
    gpu.limit_bytes = 3 * 2048
    work = Work(gpu, array())
    with pytest.raises(MemoryError):
        PartStreams(1, None).run(work, array())
    assert gpu.pinned == {}


def steps_without(left_out):
    """Return a function of steps that do not wait for one kind of event."""

    def fewer(*args):
        for step in schedule_steps(*args):
            after = tuple(end for end in step.after if (end[0], step.action) != left_out)
            yield Step(step.action, step.part, after)

    return fewer


@pytest.mark.parametrize(
    ("left_out", "pinned_in", "pinned_out", "is_reduced"),
    [
        (("up", "fill"), False, True, False),
        (("down", "up"), True, True, False),
        (("run", "up"), True, False, True),
        (("up", "run"), True, True, False),
        (("run", "down"), True, True, False),
        (("down", "empty"), True, False, False),
        ("the end", True, True, False),
        ("the threads", False, True, False),
    ],
    ids=str,
)
def test_without_an_event_a_race_is_found(
    gpu, monkeypatch, left_out, pinned_in, pinned_out, is_reduced
):
    """So the tests above would fail if one of them were lost: slots would be overwritten."""
    start_copy = part_streams.start_copy

    def never_waited_for(to, src):
        start_copy(to, src)
        return lambda: None

    monkeypatch.setattr(part_streams, "schedule_steps", steps_without(left_out))
    if left_out == "the end":  # of which the host waits for nothing else
        monkeypatch.setattr(Event, "synchronize", lambda self: None)
    if left_out == "the threads":
        monkeypatch.setattr(part_streams, "start_copy", never_waited_for)
    out = np.empty((ROWS, COLUMNS)) if is_reduced else array(pinned_out)
    work = Work(gpu, array(pinned_in), is_reduced=is_reduced, in_place=True)
    with pytest.raises(RaceError):
        through(gpu, work, out)


BYTES = 2**12
REPEATS = 3  # of each measurement


@pytest.fixture
def gpu(gpu, monkeypatch):
    monkeypatch.setattr("dask_p2p.backends.cupy.LINK_COPY_BYTES", BYTES)
    monkeypatch.setattr("dask_p2p.backends.cupy.LINK_COPIES", REPEATS)
    gpu.copies = []
    do = gpu.do

    def noted(timeline, operation, reads=(), writes=()):
        if operation == "a copy engine":  # whose memory of the host nobody has to have written
            do(HOST, "whoever had it", writes=reads) if not gpu.copies else None
            do(timeline, operation, reads, writes)
            gpu.copies.append((timeline, dict(gpu.clocks[timeline]), reads[0].nbytes))
        else:
            do(timeline, operation, reads, writes)

    monkeypatch.setattr(gpu, "do", noted)
    return gpu


def test_rates_are_bytes_by_time(gpu):
    link = CUPY.host_link(None)
    gbs = BYTES / 1e-3 / 1e9
    assert link == pytest.approx(HostLink(gbs, gbs, 2 * gbs))
    assert gpu.pageable_copies == 0
    gpu.check()


def test_memory_that_cannot_be_pinned_is_not_measured(gpu):
    gpu.can_pin = False
    warnings = []
    assert CUPY.host_link(lambda *words: warnings.append(words)) is None
    assert warnings == [("host memory cannot be pinned", "RuntimeError: cudaErrorMemoryAllocation")]
    assert gpu.copies == []


def test_memory_is_given_back(gpu):
    measure_host_link(None)
    assert gpu.live_bytes == 2 * BYTES, "it is kept for the next use"
    HostStreams.drop_slots()
    drop_host_slots()
    assert (gpu.live_bytes, gpu.pinned) == (0, {})
    gpu.check()


def test_without_a_gpu_there_is_nothing_to_measure(gpu):
    assert NUMPY.host_link(None) is None
    gpu.cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert CUPY.host_link(None) is None
    assert gpu.copies == []
