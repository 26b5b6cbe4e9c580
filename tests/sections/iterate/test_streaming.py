"""Fields that go through a GPU, or a cache, slab by slab: values are those of fields in memory."""

import ctypes
from functools import partial
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Record, Save, iterate
from dask_p2p.errors import BlockMismatchError, InputError, MemoryLimitError, P2PWarning
from dask_p2p.sections.exchange.device import HOST as HOST_MEMORY
from dask_p2p.sections.iterate.iteration import VisitPlan
from tests.sections.emulated import kernel, rank_tasks, run_section
from tests.sections.gangs import run_gang
from tests.sections.iterate.test_programs import X, array
from tests.simulation.streams import HOST
from tests.support import noted

ENDS = "periodic", "reflect", "nearest", "odd", 0.5, ("nearest", 0.5)


def star(u, out):
    out[...] = 0.5 * u[1:-1, 1:-1] + 0.1 * u[:-2, 1:-1] + 0.2 * u[2:, 1:-1]
    out[...] += 0.3 * u[1:-1, :-2] + 0.4 * u[1:-1, 2:]


def turned(u, v):
    return {
        "u": u[1:-1, 1:-1] + 0.1 * (v[2:, 2:] - v[:-2, :-2]),
        "v": v[1:-1, 1:-1] - 0.1 * u[2:, 1:-1],
    }


@pytest.fixture
def gpu(gpu, monkeypatch):
    """An emulated GPU; the host has written the memory that is pinned."""

    def write(address, size_bytes, flags):
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        gpu.do(HOST, "the rank", writes=[np.frombuffer(memory, np.uint8)])

    noted(monkeypatch, gpu, "pin", write)
    return gpu


def streamed(*args, steps_per_visit=None, slab_rows=None, **kwargs):
    sizes = {"steps_per_visit": steps_per_visit, "slab_rows": slab_rows}
    return iterate(*args, on_gpu="stream", **sizes, **kwargs)


def computed(*results):
    return da.compute(*results, scheduler="sync")


def of_ranks(y, inputs):
    """The values of a section whose ranks are threads here."""
    memory = SimpleNamespace(
        stream=lambda: None, written=lambda block, stream: block, read=np.array, check=lambda: None
    )
    return run_section(memory, y, inputs, device=lambda connections: HOST_MEMORY)


@pytest.mark.parametrize("boundary", ENDS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_values_of_several_ranks(boundary, ranks):
    options = {"boundary": {0: boundary, 1: boundary}}
    (expected,) = computed(iterate(star, array(), 1, 8, ranks=1, **options))
    y = streamed(star, array(), 1, 8, ranks=ranks, steps_per_visit=3, **options)
    assert np.array_equal(of_ranks(y, [X])[0], expected)


@pytest.mark.parametrize("sizes", [(1, None), (2, 3), (3, 4), (4, 5)])
def test_ends_without_halo(sizes):
    def added(u, out):
        before = len(u) - len(out)  # 0 at the first row
        out[...] = u[before:]
        out[2 - before :] += 0.5 * u[: len(u) - 2]

    options = {"depth": {0: (2, 0)}, "steps": 7, "boundary": "none", "ranks": 1}
    y = streamed(added, array(), steps_per_visit=sizes[0], slab_rows=sizes[1], **options)
    assert np.array_equal(*computed(y, iterate(added, array(), **options)))


def test_coupled_fields_on_two_ranks():
    fields = {"u": array(), "v": array(X + 1)}
    (values,) = computed(iterate(turned, fields, 1, 5, ranks=1))
    y = streamed(turned, fields, 1, 5, ranks=2, steps_per_visit=2)
    for output, name in zip(of_ranks(y["u"], [X, X + 1]), "uv", strict=True):
        assert np.array_equal(output, values[name])


SEEDS = [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 100))]


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_cases(request, seed, is_on_gpu):
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 4))
    shape = tuple(map(int, rng.integers(9, 14, ndim)))
    depth = {axis: tuple(map(int, rng.integers(0, 3, 2))) for axis in range(ndim)}
    boundary = {a: ENDS[rng.integers(len(ENDS))] for a in range(ndim)}
    chunks = tuple((n // 2 - 1, n - n // 2 + 1) for n in shape)

    def fill(newest, older, c, out):
        """A sum of neighbours with other weights, in an order that no rounding changes."""
        out[...] = -0.3 * older * c
        for axis, (before, after) in depth.items():
            for by in range(-before, after + 1):
                place = [
                    slice(d[0], d[0] + n) for d, n in zip(depth.values(), c.shape, strict=True)
                ]
                first = depth[axis][0] + by
                place[axis] = slice(first, first + c.shape[axis])
                out += (0.11 + 0.01 * by + 0.02 * axis) * newest[tuple(place)]

    def step(u, c, out):
        fill(*u, c, out=out.u)

    x, older, c = (rng.normal(size=shape) for _ in range(3))
    levels, of_points = [da.from_array(a, chunks) for a in (x, older)], da.from_array(c, chunks)
    options = {"boundary": boundary, "constants": {"c": Field(of_points, depth=0)}, "ranks": 1}
    fields = {"u": Field(levels, depth=[depth, 0])}
    (expected,) = computed(iterate(step, fields, 0, 7, **options))
    sizes = {
        "steps_per_visit": [None, 1, 2, 3, 3][rng.integers(5)],
        "slab_rows": [None, None, None, *range(1, 6)][rng.integers(8)],
    }
    gpu = request.getfixturevalue("gpu") if is_on_gpu else None
    if is_on_gpu:
        fill = kernel(gpu, fill)
        options["boundary"] = {a: opposite if b == "odd" else b for a, b in boundary.items()}
    (result,) = computed(streamed(step, fields, 0, 7, **sizes, **options))
    for level, values in zip(result["u"], expected["u"], strict=True):
        assert np.array_equal(level, values)
    if is_on_gpu:
        gpu.check()
        assert gpu.pageable_copies == 0


def opposite(rim, inside, at):
    """Halos of a visit are filled on the host, those of its steps on the GPU."""
    rim[...] = inside.apply(np.negative) if hasattr(inside, "apply") else -inside


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 4), (3, 2), (3, 7), (None, None)])
def test_fields_that_cannot_be_pinned(gpu, monkeypatch, sizes, refused):
    """Slots of pinned memory are between fields and GPU; levels pinned before are unpinned."""
    pin, calls = gpu.pin, []

    def refuse(*args):
        calls.append(args)
        if len(calls) == refused + 1:
            raise MemoryError("no more")
        pin(*args)

    def step(u, older, out):
        out[...] = u[1:-1, 1:-1] + 0.1 * (u[2:, 1:-1] - older)

    fields, options = (array(), array(X + 1)), {"depth": [1, 0], "steps": 7, "ranks": 1}
    expected = computed(*(x.map_blocks(np.asarray) for x in iterate(step, fields, **options)))
    monkeypatch.setattr(gpu, "pin", refuse)
    options |= {"steps_per_visit": sizes[0], "slab_rows": sizes[1]}
    with pytest.warns(P2PWarning, match="cannot be pinned"):
        values = computed(*streamed(kernel(gpu, step), fields, **options))
    assert np.array_equal(values, expected)
    gpu.check()
    assert gpu.pageable_copies == 0


@pytest.mark.parametrize(
    ("columns", "up_s", "run_s", "steps_and_rows"),
    [
        (7, 1e-3, 1e-6, (64, 16)),  # a slow bus: long visits
        (8, 1e-6, 1e-3, (1, 16)),  # a slow function: no step twice
        (9, 1e-4, 1e-5, (64, 128)),  # thicker slabs copy fewer strips
    ],
)
def test_sizes_by_the_times_of_the_first_visit(gpu, columns, up_s, run_s, steps_and_rows):
    x = da.zeros((4096, columns), chunks=(2048, columns))
    task = rank_tasks(streamed(kernel(gpu, star), x, 1, 100, ranks=2))[0]

    def sizes(ctx):
        plan = VisitPlan(task.body.function, ctx)
        assert (plan.steps, plan.is_timed) == (1, True)
        plan.choose([up_s, run_s, up_s])
        return plan.steps, plan.slab_rows

    def sizes_of_later_run(ctx):
        plan = VisitPlan(task.body.function, ctx)
        assert not plan.is_timed
        return plan.steps, plan.slab_rows

    first, second = run_gang(task.args[2], sizes)
    assert first == second == steps_and_rows
    assert run_gang(task.args[2], sizes_of_later_run) == [first, second]


@pytest.mark.parametrize("rows", [None, 24])
def test_gpu_with_less_memory_than_expected(gpu, monkeypatch, rows):
    """Slabs are thinner where other arrays fill the memory; a whole local block cannot be."""
    monkeypatch.setattr("dask_p2p.sections.iterate.iteration.free_bytes", lambda: 1 << 40)
    gpu.limit_bytes = 12_000
    (expected,) = computed(iterate(star, array(), 1, 7, ranks=1).map_blocks(np.asarray))
    y = streamed(kernel(gpu, star), array(), 1, 7, ranks=1, slab_rows=rows)
    if rows is None:
        with pytest.raises(MemoryLimitError, match="of free memory on the GPU for slabs of 24"):
            computed(y)
    else:
        assert np.array_equal(*computed(y), expected)


def overwriting(u, out):
    u[0] = 2
    out[...] = u[1:-1, 1:-1]


def incomplete(u, out):
    out[1:] = u[2:-1, 1:-1]


@pytest.mark.parametrize("step", [overwriting, incomplete])
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_first_call_is_checked(gpu, step, is_on_gpu):
    function = kernel(gpu, step) if is_on_gpu else step
    with pytest.raises((InputError, BlockMismatchError), match=r"only reads|to fill"):
        computed(streamed(function, array(), 1, 4, ranks=1))


def test_records_frames_and_checkpoints(tmp_path):
    """A visit ends where a callback is due; a second run resumes from the first one's files."""

    def largest(u):
        return float(abs(u).max())

    def options(name):
        return {
            "record": {"largest": Record(largest, every=3, op="max")},
            "save": Save(tmp_path / f"{name}.zarr", every=4),
            "checkpoint": Checkpoint(tmp_path / name, every=5),
            "ranks": 1,
        }

    def step(u):
        return {"u": u[1:-1, 1:-1] + 0.1 * (u[2:, 1:-1] - u[:-2, 1:-1])}

    def run(name, steps, call):
        return computed(call(step, {"u": array()}, 1, steps, **options(name)))[0]

    expected = run("core", 11, iterate)
    run("streamed", 6, partial(streamed, steps_per_visit=4))
    result = run("streamed", 11, partial(streamed, steps_per_visit=4))
    for name, values in expected.items():
        assert np.array_equal(result[name], values)
    frames = [da.from_zarr(tmp_path / f"{name}.zarr", "u") for name in ("core", "streamed")]
    assert np.array_equal(*computed(*frames))


def unused(u, *constants, out):
    pass


OLDER = Field([array(), array()], depth=1, boundary=opposite)


@pytest.mark.parametrize(
    ("match", "step", "fields", "options"),
    [
        ("on_gpu: expected None", unused, None, {"on_gpu": "all"}),
        ("on_gpu='stream', or", unused, None, {"on_gpu": None, "slab_rows": 2}),
        ("at least 1, got steps_per_visit=0", unused, None, {"steps_per_visit": 0}),
        ("steps one by one", unused, None, {"capture": True}),
        ("no overlap", unused, None, {"overlap": True}),
        ("corners=False", unused, None, {"corners": False}),
        ("as_library='torch'", unused, None, {"as_library": "torch"}),
        ("dask_p2p.Field", unused, None, {"constants": (array(),)}),
        ("several phases", [lambda u: {"u": u}] * 2, {}, {}),
        ("got a number", lambda u, t: {"u": u, "t": t}, {"t": 1.0}, {}),
        ("'at'", lambda u, at: {"u": u}, {}, {}),
        ("newest time level", lambda u, v: {"u": u}, {"v": OLDER}, {}),
        ("all periodic", lambda u, v: {"u": u}, {"v": Field(array(), boundary=0.0)}, {}),
    ],
)
def test_refused_options_and_functions(match, step, fields, options):
    fields = array() if fields is None else {"u": array(), **fields}
    with pytest.raises(InputError, match=match):
        iterate(step, fields, 1, 4, **{"on_gpu": "stream", **options})


def test_visit_longer_than_an_axis():
    with pytest.raises(InputError, match="steps_per_visit: expected at most 12"):
        computed(streamed(star, array(), 2, 40, steps_per_visit=13, ranks=1))
