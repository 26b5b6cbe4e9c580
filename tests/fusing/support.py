"""Random graphs of arrays, and programs whose ranks are threads here."""

import pickle
import warnings

import dask
import dask.array as da
import numpy as np
from dask.array.core import PerformanceWarning
from dask.highlevelgraph import HighLevelGraph
from distributed.protocol.pickle import dumps
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.fusing.planning.owners import UNKNOWN
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.planning.sizes import blocks_of_layers, sizes_of
from dask_p2p.fusing.planning.tasks import keys_of, read_graph
from dask_p2p.fusing.running.gang import ProgramContext, Runner
from dask_p2p.fusing.running.program import ReadyProgram
from dask_p2p.plans.ranks import RankGrid
from tests.sections.gangs import run_gang
from tests.transports.loopback import wait_until


def smooth(block):
    """Return a block smoothed along its first axis, with rounding that depends on the order."""
    return block + np.roll(block, 1, 0) * 0.3


class Counter:
    """A function of a block whose values depend on the number of its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self, block):
        self.count += 1
        return block + self.count


def integers(x):
    """Return an array rounded to integers, whose products BLAS adds exactly in any order.

    Its order depends on the machine, and on addresses in memory.
    """
    return (x * 8).round()


def stencil(a, b, number):
    boundary = ("periodic", "reflect", "nearest", "none", 0.5)[number % 5]
    return dask_p2p.map_overlap(
        smooth, a, depth=1 + number % 2, boundary=boundary, dtype=a.dtype, corners=number % 3 > 0
    )


def rechunked(a, b, number):
    n = len(a)
    return dask_p2p.rechunk(a, (1 + number % n, 1 + number // 7 % n))


def spectrum(a, b, number):
    return dask_p2p.fft.fftn(a, axes=((0, 1), (0,), (1,))[number % 3]).real / len(a)


def halves(a, b, number):
    at = 1 + number % (len(a) - 1)
    return da.concatenate([a[at:], b[:at]], axis=0)


#: Functions of two square arrays and a number, which return a square array.
OPERATIONS = (
    lambda a, b, number: dask_p2p.transpose(a),
    rechunked,
    lambda a, b, number: a * 0.7 - b,
    lambda a, b, number: a - a.mean(axis=number % 2, keepdims=True),
    stencil,
    halves,
    lambda a, b, number: a / (1 + abs(b).sum()),
    lambda a, b, number: a[::-1, :] + number % 3,
    spectrum,
    lambda a, b, number: da.where(a > b, a, b.T),
    lambda a, b, number: a.cumsum(axis=number % 2) / len(a),
    lambda a, b, number: a + b[number % len(b)],
    lambda a, b, number: a * da.stack([b.max(axis=0), b.min(axis=0)]).mean(axis=0),
    lambda a, b, number: a - a[a > b].sum() / a.size,
    lambda a, b, number: a.rechunk((1 + number % len(a), -1), method="tasks"),
)


def generated(shape, seed, block_info=None):
    """Return a block of an array that Dask's own tasks make."""
    where = block_info[None]
    values = np.random.default_rng(seed).normal(size=shape)
    return values[tuple(slice(start, stop) for start, stop in where["array-location"])]


@st.composite
def graphs(draw):
    """Draw several arrays of one random graph."""
    n = draw(st.sampled_from([5, 12, 24]))
    chunks = tuple(draw(st.integers(max(1, n // 5), n)) for _ in range(2))
    seed = draw(st.integers(0, 9))
    if draw(st.booleans()):
        x = da.from_array(np.random.default_rng(seed).normal(size=(n, n)), chunks=chunks)
    else:  # a function without arrays: its tasks stay with Dask
        chunks = da.core.normalize_chunks(chunks, (n, n))
        x = da.map_blocks(generated, (n, n), seed, chunks=chunks, dtype=float)
    have = [x, x + 1]
    numbers = st.tuples(
        st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # of few rows, and few columns
        for operation, one, two, number in draw(st.lists(numbers, min_size=1, max_size=8)):
            have.append(operation(have[one % len(have)], have[two % len(have)], number))
        return have[-1], have[-2].sum(), have[-1][1:, ::2]


def read_arrays(*arrays):
    """Return the graph of arrays, and what `read_graph` makes of it."""
    graph = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays)).to_dict()
    return graph, read_graph(graph, [keys_of(x) for x in arrays])


def tasks_and_sizes(*arrays):
    """Return the tasks of arrays that ranks run, and the sizes of all values."""
    tasks = read_arrays(*arrays)[1]
    layers = HighLevelGraph.merge(*(x.__dask_graph__() for x in arrays)).layers
    return tasks, sizes_of(tasks, blocks_of_layers(layers))


def run_programs(arrays, size, locations=UNKNOWN, **options):
    """Return all blocks of some arrays by key, computed by ranks in threads."""
    graph, _ = read_arrays(*arrays)
    tasks, sizes = tasks_and_sizes(*arrays)
    rank_programs = programs_of(tasks, size, sizes, locations=locations)
    programs = [pickle.loads(dumps(program)) for program in rank_programs]
    input_keys = list(tasks.inputs)
    inputs = dict(zip(input_keys, dask.get(graph, input_keys), strict=True))

    def run(ctx):
        program = programs[ctx.rank]
        return Runner(ctx, ReadyProgram(program)).run([inputs[key] for key in program.inputs])

    ranks = RankGrid(((1,) * size,), (size,))
    results = run_gang(ranks, run, context=ProgramContext, **options)
    blocks = {}
    for program, result in zip(programs, results, strict=True):
        for keys, rank_programs in zip(program.outputs, result, strict=True):
            blocks |= dict(zip(keys, rank_programs, strict=True))
    return blocks


def check_blocks(arrays, blocks, atol=0.0):
    """Check that blocks are those of Dask, bit for bit unless there is a tolerance."""
    for x in arrays:
        keys = keys_of(x)
        graph = x.__dask_graph__()
        for key, expected in zip(keys, dask.get(graph, keys), strict=True):
            computed = np.asarray(blocks[key])
            expected = np.asarray(expected)
            assert (computed.dtype, computed.shape) == (expected.dtype, expected.shape), key
            if atol:
                np.testing.assert_allclose(computed, expected, atol=atol, err_msg=str(key))
            else:
                assert computed.tobytes() == expected.tobytes(), key


def waiting(block, path):
    """Return a block once a file is there."""
    wait_until(path.exists)
    return block


def smoothed(x, steps=1):
    """Return an array after several stencils, each of them an exchange."""
    for _ in range(steps):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
    return x
