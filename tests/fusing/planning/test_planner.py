"""Plans of fused graphs: their tasks, and sizes of values."""

import pickle
from collections import Counter
from operator import add, neg
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import convert_legacy_graph, execute_graph
from dask.graph_manipulation import clone
from dask.task_spec import Alias, DataNode, Task, TaskRef
from distributed.protocol.pickle import dumps
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.fusing.planning import planner
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import AssembleStep, Declared, blocks_of_expression, peak_bytes
from dask_p2p.fusing.planning.tasks import keys_of, read_graph, unfused
from tests.fusing import support
from tests.fusing.support import read_arrays, smoothed, tasks_and_sizes
from tests.support import tune


def check(tasks, programs):
    """Check that each task runs once, and that each rank counts the uses of its values."""
    runs = Counter()
    for program in programs:
        uses = Counter(key for keys in program.outputs for key in keys)
        for superstep in program.supersteps:
            uses.update(item.key for items in superstep.sends.values() for item in items)
            for step in superstep.steps:
                is_assembled = isinstance(step, AssembleStep)
                uses.update([key for _, key in step.local] if is_assembled else step.dependencies)
                runs[step.block.key if is_assembled else step.key] += 1
        assert uses == program.uses
    assert runs == Counter(k for k, node in tasks.nodes.items() if not isinstance(node, DataNode))


def test_equal_plans_are_sent_once():
    """A program has a few hundred bytes for each task."""

    x, lengths = da.from_array(np.ones((16, 16)), chunks=(4, 16)), []
    for count in (10, 110):
        tasks, sizes = tasks_and_sizes(smoothed(x, count))
        program = programs_of(tasks, 4, sizes)[0]
        assert len({id(step.block.plan) for p in program.supersteps for step in p.steps}) == 1
        lengths.append(len(dumps(program)))
        plans = {id(s.block.plan) for p in pickle.loads(dumps(program)).supersteps for s in p.steps}
        assert len(plans) == 1
    assert (lengths[1] - lengths[0]) / 100 < 800


@pytest.mark.parametrize(("count", "most_mib"), [(1, 32), (3, 96), (10, 104)])
def test_stencils_that_are_reduced_hold_few_blocks(count, most_mib):
    x = da.random.default_rng(0).random((8192, 4096), chunks=(128, 4096))  # 16 blocks a rank
    tasks, sizes = tasks_and_sizes(smoothed(x, count).sum())
    for program in programs_of(tasks, 4, sizes):
        assert peak_bytes(program, sizes) <= most_mib * 2**20


SMALL_EXCHANGES = {
    "_LARGE_EXCHANGES_BYTES": 0,
    "_EXCHANGED_BYTES": 1,
    "_PARTS": 2**40,
    "_WORTHWHILE": float("inf"),
}


@given(support.graphs(), st.integers(2, 4))
def test_small_exchanges_have_the_same_values(arrays, size):
    with mock.patch.multiple(planner, **SMALL_EXCHANGES):
        tasks, sizes = tasks_and_sizes(*arrays)
        check(tasks, programs_of(tasks, size, sizes))
        support.check_blocks(arrays, support.run_programs(arrays, size))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_transpose_that_is_reduced_holds_few_blocks(workers):
    x = dask_p2p.transpose(da.ones((2048, 4096), chunks=(256 // workers, 4096)))
    tasks, sizes = tasks_and_sizes((x + 1).sum(axis=0))
    for program in programs_of(tasks, workers, sizes):
        own_bytes = peak_bytes(program, sizes) - x.nbytes / workers
        assert own_bytes < x.nbytes / workers / 2


def test_messages_of_two_ranks_are_small():
    """Otherwise two ranks with four blocks of 1 MiB each would take a quarter more memory."""
    tasks, sizes = tasks_and_sizes(dask_p2p.transpose(da.ones((1024, 1024), chunks=(128, 1024))))
    for program in programs_of(tasks, 2, sizes):
        with_messages = peak_bytes(program, sizes, with_messages=True)
        copies_bytes = with_messages - peak_bytes(program, sizes)
        assert 0 < copies_bytes <= 2**20  # half of them sent, half of them received


def test_layers_that_read_each_other():
    """Their tasks stay in the order of the graph."""
    graph = {("a", 0): (np.ones, 4), ("b", 0): (np.negative, ("a", 0))}
    graph |= {("a", 1): (np.negative, ("b", 0)), ("b", 1): (np.negative, ("a", 1))}
    y = da.Array(graph, "b", ((4, 4),), dtype=float) + 1
    assert y.compute(scheduler="sync").tolist() == [0.0] * 8
    np.testing.assert_array_equal(dask_p2p.fused(y, ranks=1).compute(scheduler="sync"), 0)


class File:
    """An array in a file, as Dask sees it."""

    shape, dtype, ndim = (8, 8), np.dtype(float), 2

    def __getitem__(self, index):
        return np.ones(self.shape)[index]


def make_block(n):
    return np.ones((n, n))


def names(keys):
    return {key[0] if isinstance(key, tuple) else key for key in keys}


IN_RANKS = {
    "memory": lambda: da.from_array(np.ones((8, 8)), chunks=4),
    "memory inside of tasks": lambda: da.from_array(np.ones((8, 8)), chunks=4, inline_array=True),
    "ones": lambda: da.ones((8, 8), chunks=4),
    "full": lambda: da.full((8, 8), 3.0, chunks=4),
    "empty": lambda: da.empty((8, 8), chunks=4),
    "eye": lambda: da.eye(8, chunks=4),
    "arange": lambda: da.arange(8, chunks=4),
    "linspace": lambda: da.linspace(0, 1, 8, chunks=4),
    "random": lambda: da.random.default_rng(0).random((8, 8), chunks=4),
    "old random": lambda: da.random.RandomState(0).normal(size=(8, 8), chunks=4),
}
WITH_DASK = {
    "a file": lambda: da.from_array(File(), chunks=4),
    "a file inside of tasks": lambda: da.from_array(File(), chunks=4, inline_array=True),
    "a function without arrays": lambda: da.map_blocks(
        lambda block_info=None: np.zeros(block_info[None]["chunk-shape"]),
        chunks=((4, 4), (8,)),
        dtype=float,
    ),
    "a delayed function": lambda: da.from_delayed(dask.delayed(make_block)(8), (8, 8), float),
}


@pytest.mark.parametrize("kind", IN_RANKS)
def test_arrays_of_few_numbers_are_made_by_ranks(kind):
    _, read = read_arrays(IN_RANKS[kind]() + 1)
    assert not read.dask_tasks
    assert not read.inputs


@pytest.mark.parametrize("kind", WITH_DASK)
def test_reads_and_unknown_functions_stay_with_dask(kind):
    x = WITH_DASK[kind]()
    y = dask_p2p.transpose(x + 1)
    _, read = read_arrays(y)
    assert names(read.inputs) == {x.name} or kind == "a delayed function"
    assert names(read.nodes) >= {(x + 1).name, y.name}
    assert not read.dask_tasks.keys() & read.nodes.keys()
    assert read.dask_tasks.keys() >= set(read.inputs)


def test_copies_of_tasks_have_keys_of_their_own():
    """Dask copies aliases under other keys than their own."""
    x = da.from_array(np.arange(4), chunks=-1).rechunk(2) * 2
    y = clone(x)
    arrays = [y == x]
    read = read_arrays(*arrays)[1]
    assert all(node.key == key for key, node in read.nodes.items())
    support.check_blocks(arrays, support.run_programs(arrays, 2))


def test_sections_and_all_before_them_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = dask_p2p.spmd(lambda ctx, x: x / 2, dask_p2p.transpose(x + 1), ranks=2)
    _, read = read_arrays(dask_p2p.transpose(y) + x)
    assert {x.name, y.name, (x + 1).name} <= names(read.dask_tasks)
    assert names(read.inputs) == {x.name, y.name}
    assert (dask_p2p.transpose(y) + x).name in names(read.nodes)


def test_shuffles_of_dask_stay():
    x = da.ones((8, 8), chunks=(2, 8))
    y = x.rechunk((8, 2), method="p2p")
    graph = {k: t for layer in y.__dask_graph__().layers.values() for k, t in layer.items()}
    _, read = read_arrays(da.Array(graph, y.name, y.chunks, y.dtype) + 1)
    assert names(read.inputs) == {y.name}
    assert x.name in names(read.dask_tasks)


class Recorded(File):
    """A file that records which elements were read."""

    def __init__(self):
        self.read_indices = []

    def __getitem__(self, index):
        self.read_indices.append(index)
        return super().__getitem__(index)


def test_dask_reads_only_the_slices_that_ranks_need():
    file = Recorded()
    x = da.from_array(file, chunks=8, inline_array=True)
    y = x[2:4, 1:][:, :5] + 1
    read = {}
    for way in (y, dask_p2p.fused(y, ranks=1)):
        file.read_indices.clear()
        np.testing.assert_array_equal(way.compute(scheduler="sync"), np.full((2, 5), 2.0))
        read[way.name] = list(file.read_indices)
    assert [*read.values()] == [[(slice(2, 4), slice(1, 8))]] * 2
    z = x[2:4] + x.sum(axis=0)  # the block has another reader
    assert names(read_arrays(z)[1].inputs) == {x.name}
    z = dask_p2p.fused(z, ranks=1)
    file.read_indices.clear()
    assert z.compute(scheduler="sync").shape == (2, 8)
    assert len(file.read_indices) == 1


def test_tasks_that_the_scheduler_has_stay():
    x = da.ones((8, 8), chunks=4) + 1
    y = x * 2
    graph = y.__dask_graph__().to_dict()
    read = read_graph(graph, [keys_of(y)], known_keys={(x.name, 0, 0)})
    assert (x.name, 0, 0) in read.dask_tasks
    assert (x.name, 0, 1) in read.nodes
    assert read.inputs == ((x.name, 0, 0),)


def fused(key):
    """A task that Dask has fused from two, under a key."""
    first = Task(("a", 0), add, TaskRef(("x", 0)), 1)
    return Task.fuse(first, Task(("b", 0), neg, TaskRef(("a", 0))), key=key)


@pytest.mark.parametrize("key", [("b", 0), ("c", 0)])
def test_the_parts_take_the_place_of_a_fused_task(key):
    graph = {("x", 0): Task(("x", 0), int, 4), key: fused(key)}
    nodes = unfused(graph)
    assert {*nodes} == {("x", 0), ("a", 0), key}
    assert nodes["a", 0].func is add
    assert nodes[key].func is neg
    assert run_of(nodes, key) == run_of(graph, key) == -5


def test_a_part_with_the_key_of_another_task():
    """An alias of an expression's name for the fused task would be an alias of itself."""
    graph = {("x", 0): Task(("x", 0), int, 4), ("c", 0): fused(("c", 0))}
    for key in (("a", 0), ("b", 0)):
        named = {**graph, key: Alias(key, ("c", 0))}
        nodes = unfused(named)
        assert nodes[key] is named[key]
        assert run_of(nodes, key) == -5


def run_of(graph, key):
    return execute_graph(convert_legacy_graph(dict(graph)), keys=[key])[key]


def declared_sizes(x):
    """Sizes of the blocks of an array, as the arrays of its graph declare them."""
    _, sizes = tasks_and_sizes(x)
    return {size for key, size in sizes.items() if key[0] == x.name}


def vector():
    return da.random.default_rng(0).random(64, chunks=16)


def transposed_f4():
    return dask_p2p.transpose(da.from_array(np.ones((64, 64), "f4"), chunks=(8, 64)))


#: Arrays whose blocks are larger than their inputs, or made without a shape: in items of 8 bytes.
DECLARED = {
    "assembled": (transposed_f4, 64 * 8 / 2),
    "of assembled blocks": (lambda: transposed_f4() + 1, 64 * 8 / 2),
    "arange": (lambda: da.arange(64, chunks=16, dtype=float) + 1, 16),
    "outer difference": (lambda: vector()[:, None] - vector()[None, :], 16 * 16),
    "outer product": (lambda: da.outer(vector(), vector()), 16 * 16),
    "repeated": (
        lambda: vector().map_blocks(np.repeat, 9, axis=0, chunks=((144,) * 4,), dtype=float) + 1,
        9 * 16,
    ),
    "concatenated": (lambda: vector().rechunk(64, method="tasks") + 1, 64),
    "of functions": (
        lambda: da.from_delayed(dask.delayed(make_block)(8), (8, 8), float) + 1,
        8 * 8,
    ),
    "of small items": (lambda: vector() > 0.5, 16 / 8),
    "reduced": (lambda: da.ones((64, 32), chunks=16).mean(axis=0, keepdims=True), 16),
}


@pytest.mark.parametrize("kind", DECLARED)
def test_declared_sizes(kind):
    make_array, items = DECLARED[kind]
    assert declared_sizes(make_array()) == {int(items * 8)}


def test_unknown_chunk_sizes():
    x = vector()
    assert declared_sizes(x[x > 0.5] + 1) == {16 * 8}, "that of the largest input"


@pytest.mark.parametrize("shape", [(64,), (64, 32)])
def test_first_parts_of_cumulative_operations(shape):
    """Dask makes them from their shape alone."""
    tasks, sizes = tasks_and_sizes(da.ones(shape, chunks=16).cumsum(axis=0))
    assert max(sizes[key] for key in tasks.nodes if key[1] == "extra") == 8 * 16 ** len(shape)


@pytest.mark.parametrize(("lent_read_bytes", "copies"), [(2**20, 2), (1, 0)])
def test_regions_in_messages(monkeypatch, lent_read_bytes, copies):
    """One is sent and one is received, unless they are large enough to be read in place."""
    tune(monkeypatch, lent_read_bytes=lent_read_bytes, read_bytes=1)
    tasks, sizes = tasks_and_sizes(dask_p2p.transpose(da.ones((64, 64), chunks=(32, 64))))
    for program in programs_of(tasks, 2, sizes):
        with_messages = peak_bytes(program, sizes, with_messages=True)
        copies_bytes = with_messages - peak_bytes(program, sizes)
        assert copies_bytes == copies * 32 * 32 * 8


@pytest.mark.parametrize("merges", [False, True])
def test_blocks_of_expressions(dask_array, merges):
    """Merged operations have parts."""
    x = dask_array.ones((6, 4), chunks=(2, 4), dtype="f4")
    y = (x[:, None] - x[None]) * 2
    names = {expr._name: expr for expr in y.expr.optimize(fuse=False).walk()}
    blocks = blocks_of_expression(y.expr.optimize(fuse=merges))
    assert {name for name, expr in names.items() if hasattr(expr, "chunks")} <= {*blocks}
    assert Declared(((2,) * 3, (2,) * 3, (4,)), np.dtype("f4")) in blocks.values()
