"""Ranks: functions that keep values in threads of one process, errors, and memory."""

from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import PerRank, Record, Save, iterate, spmd
from dask_p2p.errors import InputError, P2PWarning, UnsupportedArrayError
from tests.support import own_client

X = np.arange(32.0).reshape(8, 4)
RANKS = 4
OPTIONS = {"ranks": RANKS, "outputs": PerRank(0.0)}


def array():
    return da.from_array(X, chunks=(2, 4))


def counting():
    """Return a function that returns the number of its calls."""
    calls = []

    def count(*args):
        calls.append(1)
        return len(calls)

    return count


def closure():
    count = counting()
    return spmd(lambda ctx, x: (ctx.barrier(), count())[1], array(), **OPTIONS)


def stepped(**options):
    return iterate(lambda u: {"u": u[1:-1, 1:-1] + 1}, {"u": array()}, 1, 3, ranks=RANKS, **options)


def record():
    count = counting()
    return stepped(record={"n": Record(lambda u: count(), op="max")})["n"] / [1, 2, 3]


def boundary():
    count = counting()

    def ends(rim, inside, at):
        rim[...] = count()

    def first(u):
        return {"u": u[1:-1, :1] + np.zeros(4)}

    return iterate(first, {"u": array()}, 1, 1, boundary={0: 0, 1: ends}, ranks=RANKS)["u"]


def two_functions():
    """The functions of one rank share their objects."""
    calls = []

    def function(u):
        calls.append(1)
        return {"u": u[1:-1, 1:-1]}

    options = {"ranks": RANKS, "record": {"n": Record(lambda u: len(calls), op="max")}}
    return iterate(function, {"u": array()}, 1, 3, **options)["n"] / [1, 2, 3]


class NoCopy:
    """As a lock, it can be sent to a rank, but not be copied there."""

    was_sent = False

    def __getstate__(self):
        if self.was_sent:
            raise TypeError("cannot be pickled")
        return {"was_sent": True}

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def arguments():
    def count(ctx, x, log, module, lock):
        assert module is np
        log.append(ctx.rank)
        ctx.barrier()
        return len(log)

    return spmd(count, array(), log=[], module=np, lock=NoCopy(), **OPTIONS)


PROGRAMS = [closure, record, boundary, two_functions, arguments]


@pytest.fixture(scope="module")
def in_process():
    with own_client(2, threads_per_worker=2, processes=False) as client:
        yield client


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_of_one_process_share_no_objects(in_process, program):
    made = program()
    for _ in range(2):
        np.testing.assert_array_equal(made.compute(), np.ones(made.shape))


def test_ranks_of_one_process_share_no_functions_of_computed_fields(in_process, tmp_path):
    zarr = pytest.importorskip("zarr")
    count = counting()
    save = Save(tmp_path, every=1, compute={"n": lambda u: u[1:-1, 1:-1] * 0 + count()})
    stepped(save=save)["u"].compute()
    # The first call, before all steps, is for the dtype.
    frames = np.broadcast_to(np.array([2, 3, 4])[:, None, None], (3, 8, 4))
    np.testing.assert_array_equal(zarr.open(tmp_path)["n"][:], frames)


def steps_of(ctx, x):
    for step in ctx.steps(9):
        assert (step, ctx.rank) != (7, ctx.size - 1)
    return x


def step_of(u, at):
    assert (at.step, at.rank) != (7, 3)
    return u


def record_of(u, at):
    assert (at.step, at.rank) != (6, 3)
    return u.sum()


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        (lambda **kw: spmd(steps_of, array(), **kw), " after 7 steps"),
        (lambda **kw: spmd(lambda ctx, x: ctx.barrier() or x / None, array(), **kw), ""),
        (lambda **kw: iterate(step_of, array(), 0, 9, **kw), " after 7 steps"),
        (
            lambda **kw: iterate(
                lambda u: {"u": u}, {"u": array()}, 0, 9, record={"sum": record_of}, **kw
            )["u"],
            " after 7 steps",
        ),
        (lambda **kw: iterate(lambda u: u / None, array(), 0, 9, **kw), " after 0 steps"),
    ],
)
def test_errors_name_the_rank_and_the_steps_done(in_process, program, steps):
    with pytest.raises((AssertionError, TypeError)) as caught:
        program(ranks=RANKS).compute()
    notes = [note for note in caught.value.__notes__ if note.startswith("Raised on rank")]
    assert len(notes) == 1
    if "7" in steps:
        assert notes == [f"Raised on rank 3 of 4{steps}."]
    assert notes[0].endswith(f" of 4{steps}.")


# --- functions that draw NumPy's global random numbers in ranks that share them


CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
MATCH = r"drew NumPy's global random numbers .*default_rng\(\(seed, ctx.rank\)\)"


def seeded(ctx):
    np.random.seed(ctx.rank)
    ctx.barrier()
    return np.random.rand()


def drawn(ctx):
    return np.random.rand()


def by_state(ctx):
    return np.random.RandomState(ctx.rank).rand()


def by_generator(ctx):
    return np.random.default_rng((0, ctx.rank)).random()


@pytest.mark.parametrize("function", [seeded, drawn])
def test_ranks_in_threads_of_one_worker_are_warned(client, function):
    with pytest.warns(P2PWarning, match=MATCH):
        spmd(function, outputs=PerRank(0.0), ranks=4).compute()


@pytest.mark.parametrize(
    ("function", "ranks"), [(seeded, 2), (drawn, 1), (seeded, 1), (by_state, 4), (by_generator, 4)]
)
def test_other_ranks_draw_without_a_word(client, recwarn, function, ranks):
    """In processes of their own, or from generators of their own."""
    numbers = spmd(function, outputs=PerRank(0.0), ranks=ranks).compute()
    contexts = (SimpleNamespace(rank=rank, barrier=lambda: None) for rank in range(ranks))
    assert function is drawn or numbers.tolist() == [*map(function, contexts)]
    assert not [warning for warning in recwarn if issubclass(warning.category, P2PWarning)]


MATRIX = np.arange(24.0).reshape(6, 4)


def matrix(x=MATRIX):
    return da.from_array(x, chunks=(3, 2))


def same(u):
    return u


@pytest.mark.parametrize("constants", [2.0, np.ones(4), "c", da.ones(6, chunks=3), {"c": 1}])
def test_constants_are_several(constants):
    with pytest.raises(InputError, match=r"constants: expected a tuple .* as \(constant,\)"):
        iterate(same, matrix(), 0, 1, constants=constants)


@pytest.mark.parametrize(
    "keywords",
    [
        {"constants": (dask.delayed(2.0),)},
        {"constants": ([matrix()],)},
        {"c": matrix().max()},
        {"c": {"of": [matrix()]}},
    ],
    ids=["delayed", "in a list", "an array", "in a dict"],
)
def test_what_is_still_to_be_computed(keywords):
    match = "expected computed constants and keywords, got (Delayed|dask.array)"
    with pytest.raises(InputError, match=match):
        iterate(same, matrix(), 0, 1, **keywords)
    if "c" in keywords:
        with pytest.raises(InputError, match=match):
            spmd(lambda ctx, x, c: x, matrix(), **keywords)


def test_futures_are_not_there_yet(client):
    future = client.scatter(np.ones(4))
    with pytest.raises(InputError, match="expected computed constants and keywords, got <Future"):
        iterate(same, matrix(), 0, 1, constants=(future,))


@pytest.mark.parametrize("dtype", [object, [("a", "f8"), ("b", "O")]])
def test_python_objects_are_no_fields(dtype):
    x = da.from_array(np.empty((6, 4), dtype), chunks=(3, 2))
    with pytest.raises(UnsupportedArrayError, match="expected fields without Python objects"):
        iterate(same, x, 0, 1)

    def halo_array(ctx, a):
        return ctx.with_halo(a).inner

    with pytest.raises(InputError, match="expected one without Python objects"):
        spmd(halo_array, x, ranks=1).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("dtype", "boundary"),
    [("i8", np.nan), ("i8", 0.5), ("i1", 1000), ("u2", -1), ("f8", 1j), ("?", 2)],
)
def test_boundaries_that_the_fields_cannot_hold(dtype, boundary):
    x = matrix(MATRIX.astype(dtype))
    for beyond in (boundary, {0: "reflect", 1: boundary}):
        with pytest.raises(InputError, match=r"expected a boundary that \w+ can hold, got"):
            iterate(same, x, 1, 1, boundary=beyond)
    iterate(same, x, 1, 1, boundary=1.0 if dtype != "f8" else np.inf)


@pytest.mark.parametrize("partition", [0, (0.0,), (2,), ("x",)])
def test_partitions_are_axes(partition):
    match = "partition: expected a tuple of axes of an array of 2 dim"
    with pytest.raises(InputError, match=match):
        spmd(lambda ctx, x: x, matrix(), partition=partition)
    assert spmd(lambda ctx, x: x, matrix(), partition=(np.int64(-1),)).shape == (6, 4)
