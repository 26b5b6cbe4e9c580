"""Calls that GPUs replay: values, the order of all accesses, and ranks that decide alike."""

import gc
import threading
from functools import partial

import dask.array as da
import numpy as np
import pytest
from dask.task_spec import Task

import dask_p2p
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import Program, sizes_of
from dask_p2p.fusing.planning.tasks import keys_of, read_graph
from dask_p2p.fusing.resident import replayed_calls
from dask_p2p.fusing.resident.rank import ResidentRunner
from dask_p2p.fusing.resident.replayed_calls import HandleTable, ReplayedCalls
from dask_p2p.fusing.running.gang import ProgramContext
from dask_p2p.fusing.running.messages import FailedValue
from dask_p2p.fusing.running.program import ReadyProgram
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gpu.device import Gpu, GraphLending
from dask_p2p.sections.gpu.windows import DeviceBarrier
from dask_p2p.transports import cuda_ipc
from tests.sections.emulated import emulated_gpu
from tests.sections.gangs import run_gang
from tests.simulation.streams import HOST, RaceError
from tests.support import tune

CALLS, FIRST = 9, 3
VALUES = np.random.default_rng(0).normal(size=(12, 40))


@pytest.fixture
def gpu(monkeypatch):
    """An emulated GPU, which each rank takes for one of its own."""
    tune(monkeypatch, replay_after_calls=FIRST)
    emulated = emulated_gpu(monkeypatch)
    names = threading.local(), iter(range(10, 10_000))

    def own_name():
        own_prefix, numbers = names
        own_prefix.name = getattr(own_prefix, "name", None) or f"gpu {next(numbers)}"
        return own_prefix.name

    monkeypatch.setattr(cuda_ipc, "gpu_uuid", own_name)
    return emulated


def averaged(values):
    return np.concatenate([values[:1], (values[2:] + values[:-2]) / 2 + 0.1, values[-1:]])


def smooth(block):
    return block.apply(averaged)


def halved(values):
    return values / 2


def half(block):
    return block.apply(halved)


def stencil(x):
    return dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)


def with_constants(x):
    """An overlap with constants at the ends, and then another exchange."""
    y = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary=0.5, dtype=x.dtype)
    return dask_p2p.transpose(dask_p2p.transpose(y).map_blocks(half, dtype=x.dtype))


def exchanged_by_some(x):
    """Only the first two ranks exchange items."""
    y = dask_p2p.rechunk(x, ((4, 2, 3, 3), -1)).map_blocks(half, dtype=x.dtype)
    return dask_p2p.rechunk(y, x.chunks)


def made_by_another():
    raise AssertionError("the blocks of arguments come from the client")


class Calls:
    """A program on emulated GPUs, whose result is the argument of the next call."""

    def __init__(self, gpu, function, ranks=4, values=VALUES):
        self.gpu, self.values, self.ranks = gpu, values, ranks
        rows = len(values) // 4
        keys = [("u", n, 0) for n in range(4)]
        meta = gpu.empty((0, 0), values.dtype)
        chunks = ((rows,) * 4, values.shape[1:])
        u = da.Array({key: Task(key, made_by_another) for key in keys}, "u", chunks, meta=meta)
        y = function(u)
        assert y.chunks == chunks
        owners = {key: number * ranks // 4 for number, key in enumerate(keys)}
        pinned = owners | {key: owners["u", *key[1:]] for key in keys_of(y)}
        self.tasks = read_graph(dict(y.__dask_graph__()), [keys_of(y)])
        self.programs = programs_of(self.tasks, ranks, sizes_of(self.tasks, {}), pinned)
        self.blocks = {key: values[rows * n : rows * (n + 1)] for n, key in enumerate(keys)}

    def run(self, **options):
        """Return the values of all calls."""
        by_rank = self.run_ranks(**options)
        return [
            np.concatenate([b for blocks in array_outputs for b in blocks])
            for array_outputs in zip(*by_rank, strict=True)
        ]

    def run_ranks(self, calls=CALLS, change=lambda rank, call, blocks: blocks, device=Gpu):
        """Return the blocks by rank and call."""

        def function(ctx):
            program = self.programs[ctx.rank]
            rank_blocks = [self.gpu.written(self.blocks[key]) for key in program.inputs]
            with ctx.device.running(rank_blocks):
                table = HandleTable(program, ("u",), rank_blocks)
                ready = ReadyProgram(program, runs_again=True)
                ranks_calls = ReplayedCalls(ctx, ready, table, ResidentRunner(ctx, ready).call)
                results, handle = [], -1
                for call in range(calls):
                    blocks = change(ctx.rank, call, table.read([handle]))
                    table.add(call, ranks_calls.call(blocks, call + 1))
                    handle = call
                for handle_number in range(calls):  # not before, since the host would wait
                    handle_blocks = table.handles[handle_number].values()
                    results.append([ctx.device.to_host(block) for block in handle_blocks])
            return results

        grid = RankGrid(((1,) * self.ranks,), (self.ranks,))
        by_rank = run_gang(grid, function, context=ProgramContext, device=device)
        gc.collect()
        self.gpu.check()
        return by_rank


def check(results, function, values=VALUES):
    for result in results:
        values = function(values)
        assert np.array_equal(result, values)


def stencil_of(values):
    return averaged(np.concatenate([values[-1:], values, values[:1]]))[1:-1]


def with_constants_of(values):
    rim = np.full((1, values.shape[1]), 0.5)
    return halved(averaged(np.concatenate([rim, values, rim]))[1:-1])


@pytest.mark.parametrize(
    ("function", "expected", "ranks"),
    [
        *((stencil, stencil_of, ranks) for ranks in (1, 2, 4)),
        (with_constants, with_constants_of, 4),
        (exchanged_by_some, halved, 4),
    ],
)
def test_calls_are_replayed(gpu, replayed, function, expected, ranks):
    check(Calls(gpu, function, ranks).run(), expected)
    assert len(replayed) == ranks * (CALLS - FIRST)  # two of them are verified


def after_previous(values):
    return np.concatenate([values[:1], (values[:-1] + values[1:]) / 2])


def one_sided(x):
    return dask_p2p.map_overlap(
        lambda block: block.apply(after_previous), x, {0: (1, 0)}, "periodic", dtype=x.dtype
    )


def added_in_place(block, neighbour):
    recorder = block.recorder
    recorder.do(recorder.current[-1].name, "the function", reads=[neighbour], writes=[block])
    block.values[...] += neighbour.values
    return block


def in_place(x):
    y = x.map_blocks(half, dtype=x.dtype, meta=x._meta)
    return da.map_blocks(added_in_place, y, one_sided(y), dtype=x.dtype, meta=x._meta)


def one_sided_of(values):
    return (np.roll(values, 1, 0) + values) / 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: one_sided(one_sided(x)), lambda values: one_sided_of(one_sided_of(values))),
        (in_place, lambda values: halved(values) + one_sided_of(halved(values))),
    ],
    ids=["memory", "overwritten"],
)
def test_arrays_are_kept_until_readers_that_send_nothing_have_read_them(
    gpu, monkeypatch, function, expected
):
    """Readers acknowledge the bytes of several exchanges in one message."""
    tune(monkeypatch, lent_bytes=3 * VALUES[:3].nbytes, replay_after_calls=CALLS)
    check(Calls(gpu, function).run(), expected)


@pytest.mark.parametrize("missing", ["of an exchange", "at the end"])
def test_a_missing_barrier_is_found(gpu, monkeypatch, missing):
    gpu.barrier_timeout_s = 1.0  # of the other ranks
    if missing == "at the end":
        monkeypatch.setattr(GraphLending, "put_barrier", lambda self: None)
        original = GraphLending.end

        def end(self, *arguments):
            self._barrier.enqueue()
            original(self, *arguments)

        monkeypatch.setattr(GraphLending, "end", end)
    else:
        original = DeviceBarrier.enqueue
        puts = threading.local()

        def put(self):
            puts.count = getattr(puts, "count", 0) + 1
            if puts.count % 2 == 0:
                original(self)

        monkeypatch.setattr(DeviceBarrier, "enqueue", put)
    with pytest.raises(RaceError):
        Calls(gpu, stencil).run()


def test_arguments_that_change(gpu, replayed):
    """Arguments of earlier calls, and one twice: it is copied once."""
    calls = Calls(gpu, stencil)
    firsts = {}

    def change(rank, call, blocks):
        firsts.setdefault(rank, blocks)
        return firsts[rank] if call in (6, 7) else blocks

    results = calls.run(change=change)
    check(results[:6], stencil_of)
    assert all(np.array_equal(result, results[0]) for result in results[6:8])
    assert np.array_equal(results[8], stencil_of(results[0]))
    assert len(replayed) == 4 * (CALLS - FIRST)


class Marks:
    """Functions that change, and the ranks that a test means."""

    calls = 0
    refuses = staticmethod(lambda: False)


def counting(block):
    Marks.calls += 1
    number = Marks.calls
    return block.apply(lambda values: averaged(values) + number)


def reading(block):
    if block.recorder.capture is not None and Marks.refuses():
        block.get()
    return smooth(block)


def elsewhere(block):
    """Return an array that is written outside of the captured stream."""
    if block.recorder.capture is None:
        return smooth(block)
    output = block.recorder.empty(block.shape, block.dtype)
    output.values[...] = averaged(block.values)
    block.recorder.do(HOST, "another stream", writes=[output])
    return output


def failing(block):
    if block.recorder.capture is None and Marks.refuses():
        raise ValueError("as a test wants")
    return smooth(block)


def stencil_with(function):
    return lambda x: dask_p2p.map_overlap(
        function, x, depth={0: 1}, boundary="periodic", dtype=x.dtype
    )


@pytest.fixture
def replayable(monkeypatch):
    """All functions may be replayed, whatever their code does."""
    monkeypatch.setattr(replayed_calls, "is_replayable_step", lambda step: True)


@pytest.mark.usefixtures("replayable")
@pytest.mark.parametrize("rank", [0, 2, None])
def test_a_function_that_reads_is_called(gpu, replayed, monkeypatch, rank):
    """On one rank, in the middle of an exchange, or on all."""
    threads = {}

    def change(calling_rank, call, blocks):
        threads.setdefault(threading.get_ident(), calling_rank)
        return blocks

    monkeypatch.setattr(
        Marks, "refuses", lambda: rank in (None, threads.get(threading.get_ident()))
    )
    calls = Calls(gpu, lambda x: stencil(stencil_with(reading)(x)))
    check(calls.run(change=change), lambda values: stencil_of(stencil_of(values)))
    assert not replayed


@pytest.mark.usefixtures("replayable")
def test_a_function_that_works_on_another_stream_is_called(gpu, replayed):
    check(Calls(gpu, stencil_with(elsewhere)).run(), stencil_of)
    assert len(replayed) == 4  # once, to be compared


def test_the_code_of_functions_decides(gpu, replayed):
    check(Calls(gpu, stencil_with(lambda block: smooth(block))).run(), stencil_of)
    assert len(replayed) == 4 * (CALLS - FIRST)
    replayed.clear()
    Calls(gpu, stencil_with(counting), ranks=1).run()
    assert not replayed


@pytest.mark.parametrize(
    "how",
    ["one GPU", "large", "few calls", "no windows", "constants", "other dtypes", "one connection"],
)
def test_calls_that_go_on_one_by_one(gpu, replayed, monkeypatch, how):
    function, device, expected = stencil, Gpu, stencil_of
    if how == "one GPU":
        monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda: "gpu")
    elif how == "large":
        tune(monkeypatch, captured_bytes=1000)
    elif how == "few calls":
        tune(monkeypatch, replay_after_calls=CALLS)
    elif how == "no windows":
        device = partial(Gpu, has_windows=False)
    elif how == "one connection":
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    elif how == "constants":
        monkeypatch.setattr(ReplayedCalls, "_can_begin", with_constants_in_host_memory)
    else:
        monkeypatch.setattr(HandleTable, "has_one_dtype_by_shape", lambda table: False)
    check(Calls(gpu, function).run(device=device), expected)
    assert not replayed


CAN_BEGIN = ReplayedCalls._can_begin


def with_constants_in_host_memory(replayed_calls, *arguments):
    literals = replayed_calls._ready.program.literals
    literals["a constant"] = np.ones(3)
    try:
        return CAN_BEGIN(replayed_calls, *arguments)
    finally:
        del literals["a constant"]


@pytest.mark.usefixtures("replayable")
@pytest.mark.parametrize("call", range(CALLS - 1))
def test_a_failed_call_does_not_stop_the_others(gpu, replayed, monkeypatch, call):
    """The call after it has the first argument again."""
    ranks = threading.local()
    monkeypatch.setattr(Marks, "refuses", lambda: ranks.refuses)

    def change(rank, number, blocks):
        ranks.refuses = (rank, number) == (2, call)
        ranks.first = blocks if number == 0 else ranks.first
        return ranks.first if number == call + 1 else blocks

    results = Calls(gpu, stencil_with(failing)).run_ranks(change=change)
    is_called = call < FIRST + 2
    launches = 0 if call <= FIRST else 2 if is_called else CALLS - FIRST
    assert len(replayed) == 4 * launches
    for rank in range(4):
        values = VALUES
        for number, blocks in enumerate(results[rank]):
            values = stencil_of(VALUES if number == call + 1 else values)
            if (rank, number) == (2, call) and is_called:
                assert type(blocks[0]) is FailedValue
            else:
                assert np.array_equal(blocks[0], values[3 * rank : 3 * rank + 3])


KEYS = (("u", 0, 0), ("v", 0), ("constant", 3), ("u", 1, 0))


def table(blocks=(10, 20, 30, 40)):
    outputs = ((("r", 0, 1), ("r", 2, 2)), (("total",),))
    return HandleTable(Program(KEYS, {}, (), {}, outputs, False), ("u", "v"), blocks)


def test_a_state_has_all_handles():
    values = np.arange(24.0).reshape(4, 6)
    blocks = [
        *(values, values.T, values[::2, 1::2], values[:0], np.float32(2)),
        np.ma.masked_greater(values, 5),
        "text",
    ]
    before = table()
    before.handles[3] = dict(enumerate(blocks))
    state = np.concatenate(before.state())
    after = table((1, 2, 3, 4))
    after.restore(memoryview(state))
    assert after.handles[-1] == {(0, 0): 1, (1, 0): 4}, "arguments are those of the new attempt"
    restored = [after.handles[3][number] for number in range(len(blocks))]
    for block, expected in zip(restored, blocks, strict=True):
        assert type(block) is type(expected)
        assert np.array_equal(block, expected)
    restored[0][:] = 0  # writable, and memory of its own
    again = table()
    again.restore(memoryview(state))
    assert np.array_equal(again.handles[3][0], values)
