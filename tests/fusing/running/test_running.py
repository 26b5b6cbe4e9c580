"""Tasks as functions of a rank's values, programs that workers keep, and ranks' messages."""

import functools
import operator
import weakref

import dask.array as da
import numpy as np
import pytest
import scipy.fft
import toolz
from dask.array.core import getter
from dask.array.random import _choice_rng as known_choice
from dask.task_spec import Alias, DataNode, List, Task, TaskRef
from distributed.protocol.pickle import dumps
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.engine.task import Blocks
from dask_p2p.errors import BlockMismatchError, UnsupportedArrayError
from dask_p2p.fusing.planning.sizes import AssembledBlock, AssembleStep, Program, Regions, Superstep
from dask_p2p.fusing.running import program as module
from dask_p2p.fusing.running.assembling import Assembling, kept_plans
from dask_p2p.fusing.running.program import Functions, KeptPrograms, call_of
from dask_p2p.ops.overlap import Stencil, Trim
from dask_p2p.plans import block_plans
from dask_p2p.plans.grid import redistribution
from dask_p2p.sections.exchange.device import HOST_ARRAYS, Lending
from tests.fusing.support import Counter, check_blocks, graphs, integers, run_programs, smooth
from tests.support import noted, tune


@given(graphs(), st.integers(1, 4))
def test_random_graphs_are_equal_bit_for_bit(arrays, size):
    check_blocks(arrays, run_programs(arrays, size))


def large(n=512):
    """An array of blocks that are worth reading in place."""
    x = da.random.default_rng(0).normal(size=(n, n), chunks=(n // 4, n))
    y = dask_p2p.map_overlap(smooth, x, depth=1, boundary="periodic", dtype=x.dtype)
    product = integers(dask_p2p.rechunk(y, (-1, n // 4))) @ integers(x)
    return dask_p2p.transpose(y), product, y[:, ::-1].T.copy() + y


@pytest.mark.parametrize("least_bytes", [1, 2**30])
def test_regions_are_equal_if_they_are_read_or_packed(monkeypatch, least_bytes):
    tune(monkeypatch, lent_read_bytes=least_bytes, read_bytes=1, read_run_bytes=1)
    arrays = large(64)
    check_blocks(arrays, run_programs(arrays, 3))


def test_the_order_in_memory_is_kept():
    """Rounding of sums depends on it."""
    x = da.random.default_rng(0).normal(size=(64, 48), chunks=(16, 48))
    y = x.map_blocks(lambda block: np.asfortranarray(block) * 1.1, dtype=float)
    arrays = (y.rechunk((-1, 48), method="tasks").map_blocks(np.asarray, dtype=float), y + y[::-1])
    check_blocks(arrays, run_programs(arrays, 4))


@pytest.mark.parametrize(
    "dtype", ["?", "f2", "c16", "M8[s]", "U3", [("a", "i1"), ("b", "f8")], "V0"]
)
def test_values_of_all_dtypes(dtype):
    x = da.from_array(np.zeros((12, 8), dtype), chunks=(3, 8)).map_blocks(np.copy, dtype=dtype)
    arrays = dask_p2p.transpose(x), x[::-1].map_blocks(np.copy, dtype=x.dtype)
    check_blocks(arrays, run_programs(arrays, 3))


class Counted:
    """Functions that make arrays and count those that are alive."""

    def __init__(self):
        self.alive, self.most_alive = 0, 0

    def __call__(self, block):
        output = block + 1
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(output, self._dropped)
        return output

    def _dropped(self):
        self.alive -= 1


COUNTED = Counted()


def counted(block):
    """Return a new block, which `COUNTED` counts; a function that pickle sends by name."""
    return COUNTED(block)


def test_values_are_dropped_after_their_last_use():
    """Each of 20 blocks is made, read, and summed before the next one."""
    COUNTED.__init__()
    x = da.ones((20, 8), chunks=(1, 8))
    y = x.map_blocks(counted, dtype=float).map_blocks(counted, dtype=float).sum()
    check_blocks([y], run_programs([y], 1))
    assert COUNTED.alive == 0
    COUNTED.most_alive = 0
    run_programs([y], 1)
    assert COUNTED.most_alive == 2


ALIVE = []  # numbers of counted blocks at calls of `with_halo`


def with_halo(block):
    ALIVE.append(COUNTED.alive)
    return block * 1


def test_a_source_is_dropped_before_the_function_of_its_halo():
    x = da.ones((8, 8), chunks=(8, 8)).map_blocks(counted, meta=np.empty((0, 0)))
    y = dask_p2p.map_overlap(with_halo, x, depth=1, boundary="periodic", dtype=float)
    ALIVE.clear()
    run_programs([y], 1)
    assert ALIVE == [0]


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_unlike_their_declaration_are_refused(size):
    x = da.ones((8, 8), chunks=(2, 8))
    mismatched = x.map_blocks(lambda block: block[:1], dtype=float)
    with pytest.raises(BlockMismatchError, match=r"declared as float64 \(2, 8\)") as caught:
        run_programs([dask_p2p.transpose(mismatched)], size)
    assert "p2p-transpose" in caught.value.__notes__[0]
    masked = x.map_blocks(np.ma.masked_less, 2, dtype=float)
    with pytest.raises(UnsupportedArrayError, match="mask"):
        run_programs([dask_p2p.transpose(masked)], size)


@pytest.mark.parametrize("kind", [np.memmap, np.recarray])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_plain_classes(size, kind):
    x = da.from_array(np.arange(64.0).reshape(8, 8), chunks=(2, 8))
    y = dask_p2p.rechunk(x.map_blocks(lambda block: block.view(kind), dtype=float), (8, 4))
    check_blocks([y], run_programs([y], size))


def test_functions_of_map_overlap_may_overwrite_their_blocks():
    def writing(block):
        block[...] = 7
        return block

    x = da.ones((8, 8), chunks=(2, 8)).map_blocks(np.copy, dtype=float)
    arrays = dask_p2p.map_overlap(writing, x, depth=0, boundary="none", dtype=float), x + 1
    check_blocks(arrays, run_programs(arrays, 1))


ROWS = (2,) * 6, (12,)
TRANSPOSE = redistribution(ROWS, (1, 0), ROWS)


def blocks_of(plan):
    return [
        AssembledBlock(("y", *index), plan, index, np.dtype(float), None)
        for index, _ in block_plans(plan)
    ]


def test_a_block_equal_to_its_source_is_not_copied():
    value = np.arange(24.0).reshape(2, 12)
    block = blocks_of(redistribution(ROWS, (0, 1), ROWS))[0]
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    assert Assembling().finish(step, {("x", 0, 0): value}) is value
    with_epilogue = AssembleStep(block._replace(epilogue=lambda out, index: out), step.local)
    copied = Assembling().finish(with_epilogue, {("x", 0, 0): value})
    assert not np.shares_memory(copied, value), "a function may overwrite it"
    np.testing.assert_array_equal(copied, value)


def test_programs_with_more_plans_than_are_kept(monkeypatch):
    """Plans of many slabs would take more memory than the blocks."""
    monkeypatch.setattr("dask_p2p.fusing.running.assembling._PLANS", kept_plans(20))
    arrays = large(256)
    check_blocks(arrays, run_programs(arrays, 3))


def test_a_source_that_differs_is_found_in_its_task(monkeypatch):
    assembling, (block, *_) = Assembling(), blocks_of(TRANSPOSE)
    step = AssembleStep(block, ((0, ("x", 0, 0)),))
    values = {("x", 0, 0): np.zeros((3, 12))}
    receives = {1: [Regions(("x", n, 0), n, block, size_bytes=32) for n in range(1, 6)]}
    assembling.begin_local(Superstep(receives=receives, steps=[step]), values)
    with pytest.raises(BlockMismatchError):
        assembling.finish(step, values)


def test_own_regions_are_copied_while_messages_arrive(monkeypatch):
    """Each once, and only into blocks that other ranks send regions of."""

    def count_pieces(lending, into, array, pieces, axes):
        return len(pieces)

    copied = noted(monkeypatch, Lending, "copy_pieces", count_pieces)
    assembling, (block, other_block, *_) = Assembling(), blocks_of(TRANSPOSE)
    sources = [np.full((2, 12), float(n)) for n in range(6)]
    steps = [
        AssembleStep(assembled_block, ((0, ("x", 0, 0)), (1, ("x", 1, 0)), (2, ("late", 2, 0))))
        for assembled_block in (block, other_block)
    ]
    receives = {1: [Regions(("x", n, 0), n, block, size_bytes=32) for n in range(3, 6)]}
    values = {("x", n, 0): sources[n] for n in range(2)}
    assembling.begin_local(Superstep(receives=receives, steps=steps), values)
    assert copied == [1, 1]
    out = assembling.begun(block, HOST_ARRAYS)
    out[:, 6:] = 9
    assembled = assembling.finish(steps[0], {**values, ("late", 2, 0): sources[2]})
    assert copied == [1] * 3
    np.testing.assert_array_equal(assembled, [[0, 0, 1, 1, 2, 2, *[9] * 6]] * 2)


VALUES = {"a": 1, ("b", 0): 2, ("b", 1): [3]}


def nodes():
    """Return a strategy for tasks and their arguments, as Dask nests them."""
    keys = st.sampled_from([*VALUES])
    leaves = st.one_of(
        keys.map(TaskRef),
        keys.map(Alias),
        st.integers().map(lambda value: DataNode(None, value)),
        st.sampled_from([0, None, "a", ("b", 0), [TaskRef]]),
        st.lists(keys, min_size=1, max_size=3).map(lambda keys: Blocks(*keys)),
    )

    def nested(inner):
        args, kwargs = st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("xy"), inner)
        return st.one_of(
            st.builds(lambda a, k: Task("task", lambda *a, **k: (a, k), *a, **k), args, kwargs),
            args.map(lambda values: List(*values)),
        )

    return nested(st.recursive(leaves, nested, max_leaves=6))


@given(nodes())
def test_tasks_have_the_values_of_dask(task):
    assert call_of(task)(VALUES) == task({key: VALUES[key] for key in task.dependencies})


def program(literal=1, count=1):
    steps = [Task(("t", n), operator.add, TaskRef("x"), TaskRef("one")) for n in range(count)]
    keys = tuple(step.key for step in steps)
    uses = {"x": count, "one": count, **dict.fromkeys(keys, 1)}
    return Program(("x",), {"one": literal}, (Superstep({}, {}, steps),), uses, (keys,), False)


def test_a_program_is_kept_between_runs():
    programs, text = KeptPrograms(), dumps(program())
    with programs.running(text) as first, programs.running(bytes(text)) as second:
        assert second is not first, "two runs at the same time"
    with programs.running(bytes(text)) as again:
        assert again in (first, second)
        assert again.runs_again


def test_a_program_with_a_literal_that_functions_may_change_is_not_kept():
    programs, text = KeptPrograms(), dumps(program({"count": 0}))
    with programs.running(text) as first:
        assert not first.runs_again
    with programs.running(text) as again:
        assert again is not first


def test_few_programs_are_kept():
    texts = [dumps(program(count=count)) for count in range(1, 7)]
    programs = KeptPrograms(most_bytes=sum(map(len, texts[-2:])))
    for text in (*texts, texts[-2]):
        with programs.running(text):
            pass
    assert [*programs._programs] == [texts[-1], texts[-2]]
    large = dumps(program(np.random.default_rng(0).bytes(2 * programs._most_bytes)))
    with programs.running(large) as ready:
        assert not ready.runs_again
    assert [*programs._programs] == [texts[-1], texts[-2]]


# --- functions of tasks: those of users, and those that keep a state


X = TaskRef("x")
FACTOR, SEEN = 3, []


def scaled(block):
    return block * FACTOR


def recorded(block):
    SEEN.append(1)
    return block


def by_value(function):
    """Return a function as cloudpickle makes it: no module has it."""
    function_copy = type(function)(
        function.__code__, function.__globals__, "by_value", function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    function_copy.__qualname__ = "by_value"
    return function_copy


def default(block, calls=[]):  # noqa: B006
    return block


def closing_over(value):
    return lambda block: (value, block)[1]


def calls_itself(n):
    return calls_itself(n - 1) if n else 0


@pytest.mark.parametrize(
    "task",
    [
        Task("y", operator.add, X, X),
        Task("y", np.sum, X, axis=(0, 1), keepdims=True),
        Task("y", getter, X, (slice(0, 3), [1, 2]), lock=None),
        Task("y", functools.partial(np.std, ddof=1), List(X, X)),
        Task("y", toolz.compose(np.abs, np.sum), X),
        Task("y", np.add, X, np.ones(3)),
        Task("y", np.sum, X, out=None),
        Task("y", scipy.fft.fft, X, overwrite_x=False),
    ],
)
def test_functions_of_known_packages(task):
    assert not Functions().is_of_user(task)


@pytest.mark.parametrize(
    ("task", "is_constant"),
    [
        (Task("y", smooth, X), True),
        (Task("y", functools.partial(np.apply_along_axis, smooth, 0), X), True),
        (Task("y", by_value(scaled), X), True),
        (Task("y", closing_over((1, "a", np.sum))), True),
        (Task("y", by_value(calls_itself), X), True),
        (Task("y", Stencil(smooth, Trim((((1, 1),),))), X), True),
        (Task("y", by_value(recorded), X), False),
        (Task("y", by_value(default), X), False),
        (Task("y", closing_over([]), X), False),
        (Task("y", closing_over(np.ones(3)), X), False),
        (Task("y", Counter(), X), False),
        (Task("y", Counter().__call__, X), False),
        (Task("y", np.random.default_rng(0).normal, X), False),
        (Task("y", smooth, X, np.random.default_rng(0)), False),
        (Task("y", smooth, X, buffer=np.empty(3)), False),
        (Task("y", toolz.compose(np.abs, Counter()), X), False),
        (Task("y", np.vectorize(by_value(recorded)), X), False),
        (Task("y", Stencil(Counter()), X), False),
        (Task("y", operator.iadd, X, 1), True),
        (Task("y", np.add, X, 1, np.empty(3)), False),
        (Task("y", np.add, X, 1, out=np.empty(3)), False),
        (Task("y", np.add, X, 1, out=X), True),
        (Task("y", functools.partial(np.add, 1, out=np.empty(3)), X), False),
        (Task("y", scipy.fft.fft, X, overwrite_x=True), True),
        (Task("y", known_choice, np.random.PCG64(0), 5), False),
        (Task("y", known_choice, np.random.RandomState(0), 5), False),
    ],
)
def test_functions_of_users(task, is_constant):
    functions = Functions()
    for _ in range(2):  # also from memory
        assert functions.is_of_user(task)
        assert (functions.fresh(task) is task) is is_constant


@pytest.mark.parametrize("runs_again", [False, True])
def test_a_copy_for_each_task(runs_again, monkeypatch):
    pickled = []
    monkeypatch.setattr(module, "dumps", lambda task: pickled.append(task) or dumps(task))
    functions, counter = Functions(runs_again), Counter()
    assert [functions.fresh(counter)(0) for _ in range(3)] == [1, 1, 1]
    assert len(pickled) == (1 if runs_again else 3)
    assert counter.count == 0
