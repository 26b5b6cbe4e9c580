"""`rechunk` and `transpose` as users call them, on the schedulers that need no cluster."""

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import assert_eq, meta_from_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.ops.programs import INSTALLED, PROGRAMS, SECTIONS, VALUES
from tests.plans.support import chunks_of
from tests.support import assert_same_bits, indexed, layers_of

X = np.arange(4 * 6 * 5).reshape(4, 6, 5)


@pytest.mark.parametrize(
    "chunks",
    ["auto", 2, -1, (2, 3, 5), (-1, None, 2), {0: 1, -1: "auto"}, {1: (1, 5)}, "80 B", {0: None}],
    ids=str,
)
@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.filterwarnings("ignore:chunk size balancing not possible")
def test_chunks_are_those_of_dask(chunks, balance):
    x = da.from_array(X, chunks=(3, 4, 2))
    result = dask_p2p.rechunk(x, chunks, balance=balance)
    expected = da.rechunk(x, chunks, balance=balance)
    assert result.chunks == expected.chunks
    assert_eq(result, expected)


def test_an_axis_without_elements_is_balanced_as_it_is():
    """Dask divides by its length."""
    x = da.ones((0, 10), chunks=(0, 3))
    assert dask_p2p.rechunk(x, {1: 5}, balance=True).chunks == ((0,), (5, 5))


@pytest.mark.filterwarnings("ignore:chunk size balancing not possible")
@pytest.mark.parametrize(
    "chunks", [(1, 2, 3, 4), (-1, None, 5, 2), [(4,), 3, 1, 9], {0: "auto"}], ids=str
)
def test_parameters_in_the_order_of_dasks(chunks):
    """Chunks of axes that there are not are ignored too."""
    x = da.from_array(X, chunks=(3, 4, 2))
    for arguments in ((4, None, False, "p2p"), (None, 240, True, "tasks")):
        result = dask_p2p.rechunk(x, chunks, *arguments)
        assert result.chunks == da.rechunk(x, chunks, *arguments[:-1], "tasks").chunks
    short = da.arange(6, chunks=6)
    assert dask_p2p.rechunk(short, (2, 4)).chunks == da.rechunk(short, (2, 4)).chunks
    with pytest.raises(InputError, match=r"expected method 'tasks' or 'p2p'.*got 'MPI'.*Leave"):
        dask_p2p.rechunk(x, 2, method="MPI")


def test_nothing_to_do_gives_the_array_itself():
    x = da.ones((4, 4), chunks=(2, 4))
    assert dask_p2p.rechunk(x, (2, 4)) is x
    assert dask_p2p.rechunk(x, {0: 2}, axes=(0, 1)) is x
    assert dask_p2p.transpose(x, (0, 1)) is x


def test_one_layer_and_blocks_that_stay_are_handed_on():
    blocks = [np.full((2, 3), i) for i in range(4)]
    x = da.concatenate([da.from_array(b, chunks=-1, asarray=False) for b in blocks[:3]])
    y = dask_p2p.rechunk(x, ((2, 4), (3,)))
    assert set(layers_of(y)) - set(layers_of(x)) == {y.name}
    task = layers_of(y)[y.name][y.name, 0, 0]
    assert task({(x.name, 0, 0): blocks[0]}) is blocks[0]


def test_unknown_sizes_are_fine_along_axes_that_stay():
    x = da.from_array(X[0], chunks=(2, 3))
    rows = x[x[:, 0] > 6]
    assert np.isnan(rows.shape[0])
    result = dask_p2p.rechunk(rows, {1: 5})
    assert result.numblocks == (3, 1)
    np.testing.assert_array_equal(result.compute(scheduler="sync"), X[0][X[0][:, 0] > 6])
    turned = dask_p2p.rechunk(rows, {0: 5}, axes=(1, 0))
    np.testing.assert_array_equal(turned.compute(scheduler="sync"), X[0][X[0][:, 0] > 6].T)
    assert dask_p2p.rechunk(rows, rows.chunks) is rows
    for chunks in ({0: 2}, -1, (2, 5)):
        with pytest.raises(InputError, match=r"(?s)known chunk sizes.*compute_chunk_sizes"):
            dask_p2p.rechunk(rows, chunks)


@pytest.mark.parametrize(
    ("chunks", "axes"),
    [*((chunks, None) for chunks in ((2, 2), {3: 1}, "a lot", -2)), (5, (0, 1)), (2, (0, 0, 1))],
    ids=str,
)
def test_wrong_input(chunks, axes):
    with pytest.raises(InputError, match=r"(?i)expected .* got "):
        dask_p2p.rechunk(da.from_array(X, chunks=2), chunks, axes=axes)


@pytest.mark.parametrize("axes", [None, (2, 0, 1)])
def test_blocks_of_groups_are_those_that_were_asked_for(axes):
    x = da.from_array(X, chunks=(4, 2, 5))
    shape = X.transpose(axes or (0, 1, 2)).shape
    after = ((1,) * shape[0], (shape[1],), (shape[2],))
    with dask.config.set({"p2p.groups": 2}):
        y = dask_p2p.rechunk(x, after, axes=axes)
    assert y.chunks == after
    assert_eq(y, X.transpose(axes or (0, 1, 2)), scheduler="sync")
    (layer,) = (layer for name, layer in layers_of(y).items() if name.startswith("p2p-"))
    assert len(layer) == 2


def test_a_large_graph_has_few_edges():
    x = da.zeros((1000, 1000), chunks=(2, 1000))
    y = dask_p2p.transpose(x, chunks=(2, 1000))
    assert y.chunks == ((2,) * 500, (1000,))
    edges = sum(len(dependencies) for dependencies in y.dask.get_all_dependencies().values())
    assert edges < 40_000
    output_bytes = dask_p2p.estimate(x, chunks=(2, 1000), workers=4).output_bytes
    assert x.nbytes / 4 <= output_bytes < x.nbytes / 3  # whole groups


def same(y, expected):
    """Check dtype, shape and bits, as declared and as computed."""
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    assert_same_bits(y.compute(scheduler="sync"), expected)


@st.composite
def transposes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    axes = draw(st.none() | st.permutations(range(len(shape))))
    order = tuple(reversed(range(len(shape)))) if axes is None else tuple(axes)
    src = tuple(chunks_of(draw, n) for n in shape)
    dst = draw(st.none() | st.just(tuple(chunks_of(draw, shape[a]) for a in order)))
    return shape, src, axes, dst


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(transposes())
def test_equals_numpy_for_any_chunks(case):
    shape, src, axes, dst = case
    x = indexed(shape)
    y = dask_p2p.transpose(da.from_array(x, chunks=src), axes, chunks=dst)
    same(y, np.transpose(x, axes))
    if dst is not None:
        order = [*reversed(range(len(shape)))] if axes is None else axes
        z = dask_p2p.rechunk(da.from_array(x, chunks=src), dst, axes=order)
        layers_of(z)
        assert y.chunks == z.chunks == dst
        assert_eq(z, x.transpose(order), scheduler="sync")


DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "longdouble",
    ">i2", ">f4", ">f8", ">c16", "M8[ns]", "m8[s]", "S5", "U3", "V7",
    [("a", "i1"), ("b", "f8")], [("x", ">i4"), ("y", "S3")],
]  # fmt: skip


def values(dtype, shape):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        raw &= 1
    if dtype.kind == "U":
        return rng.integers(0, 999, shape).astype(dtype)
    return raw.view(dtype).reshape(shape)  # NaNs with odd payloads and all


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(dtype):
    x = values(dtype, (7, 10))
    same(dask_p2p.transpose(da.from_array(x, chunks=(3, 4))), x.T)


def test_object_dtype():
    x = np.array([[1, "two"], [None, (4,)], [5.0, b"6"]], dtype=object)
    y = dask_p2p.transpose(da.from_array(x, chunks=(1, 2)))
    assert y.dtype == object
    assert y.compute(scheduler="synchronous").tolist() == x.T.tolist()


@pytest.mark.parametrize("name", ["sum", "mean", "argmax", "any"])
def test_results_of_reductions(name):
    """Their only block is a scalar of NumPy, no array."""
    x = indexed((6, 4))
    y = dask_p2p.transpose(getattr(da.from_array(x, chunks=2), name)())
    same(y, np.asarray(getattr(x, name)()))
    moment = da.from_array(x.astype("M8[s]"), chunks=2).max()
    same(dask_p2p.transpose(moment), np.asarray(x.astype("M8[s]").max()))


@pytest.mark.parametrize("make", [np.asfortranarray, lambda a: a[::-1, ::2], np.ascontiguousarray])
def test_blocks_of_any_memory_layout(make):
    x = make(indexed((8, 12)))
    x.flags.writeable = False
    same(dask_p2p.transpose(da.from_array(x, chunks=(3, 5))), x.T)


@pytest.mark.parametrize("axes", [(1, 0, 2), (-1, 0, 1), (np.int64(2), 1, 0)], ids=str)
def test_axes_one_by_one(axes):
    x = da.from_array(indexed((3, 4, 2)), chunks=2)
    one_by_one = dask_p2p.transpose(x, *axes, chunks=2)
    assert one_by_one.name == dask_p2p.transpose(x, axes, chunks=2).name
    same(one_by_one, indexed((3, 4, 2)).transpose(*axes))
    assert dask_p2p.transpose(x[0, 0], 0).shape == (2,)
    same(dask_p2p.transpose(x, np.array(axes)), indexed((3, 4, 2)).transpose(*axes))
    with pytest.raises(InputError, match=r"got axes=\(1, 0\)"):
        dask_p2p.transpose(x, 1, 0)


def test_lazy_and_one_task_an_output_block():
    x = da.ones((8, 8), chunks=(2, 8))
    x = x.map_blocks(lambda block: pytest.fail("computed"), dtype=float, meta=np.ones((0, 0)))
    y = dask_p2p.transpose(x)
    layer = layers_of(y)[y.name]
    assert len(layer) == 4
    assert {len(task.dependencies) for task in layer.values()} == {4}


def test_name_is_deterministic_and_differs_where_it_must():
    x = da.ones((8, 8), chunks=(2, 8))
    assert dask_p2p.transpose(x).name == dask_p2p.transpose(x).name
    assert dask_p2p.transpose(x).name != dask_p2p.transpose(x, chunks=4).name
    assert dask_p2p.transpose(x).name != dask_p2p.transpose(x + 1).name


def test_a_slice_computes_only_the_blocks_it_needs():
    x = indexed((8, 8))
    y = dask_p2p.transpose(da.from_array(x, chunks=(2, 8)))[:2]
    (optimised,) = dask.optimize(y)
    assert sum("p2p-transpose" in str(key) for key in optimised.dask) == 1
    same(y, x.T[:2])


@pytest.mark.parametrize("meta", [None, np.ones((0, 0))], ids=["declared", "not declared"])
def test_masked_blocks_are_refused_by_name(meta):
    """At the call, or at the task that gets them."""
    x = da.ones((4, 4), chunks=(2, 4)).map_blocks(np.ma.masked_array, meta=meta)
    with pytest.raises(UnsupportedArrayError, match=r"(?i)masked"):
        dask_p2p.transpose(x).compute(scheduler="synchronous")


@pytest.mark.parametrize(
    ("real", "words"),
    [
        (lambda b: b[:1], r"float64 \(2, 4\).*float64 \(1, 4\)"),
        (lambda b: b.astype("f4"), r"float64 \(2, 4\).*float32 \(2, 4\)"),
        (lambda b: b.astype(">i8"), r"float64 \(2, 4\).*>i8 \(2, 4\)"),
        (lambda b: b[0], r"float64 \(2, 4\).*float64 \(4,\)"),
    ],
)
def test_blocks_that_are_not_as_declared(real, words):
    x = da.ones((4, 4), chunks=(2, 4)).map_blocks(real, meta=np.ones((0, 0)), chunks=((2, 2), (4,)))
    with pytest.raises(BlockMismatchError, match=words):
        dask_p2p.transpose(x).compute(scheduler="synchronous")


@pytest.mark.parametrize("dtype", [">i4", [("a", ">i2"), ("b", "<f8")]], ids=str)
def test_blocks_in_another_byte_order_than_declared_are_converted(dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    x = da.from_array(values, chunks=(2, 3))
    x = x.map_blocks(lambda block: block.astype(block.dtype.newbyteorder("=")), dtype=x.dtype)
    for y, expected in (
        (dask_p2p.transpose(x), values.T),
        (dask_p2p.rechunk(x, (4, 1)), values),
        (dask_p2p.rechunk(x, ((2, 1, 1), (3, 3))), values),
        (dask_p2p.map_overlap(np.copy, x, depth=1, boundary="periodic"), values),
    ):
        same(y, expected)


@pytest.fixture
def arrays(library, strict_cupy):
    """The same array twice: in CuPy blocks, and in NumPy's."""
    x = library.from_array(VALUES, chunks=(6, -1))
    return x.map_blocks(strict_cupy.asarray), x


def check(y, host_array, cupy):
    """Compare an array of CuPy blocks with one of NumPy blocks."""
    with dask.config.set(scheduler="sync"):
        result, expected = y.compute(), host_array.compute()
    assert isinstance(meta_from_array(y), cupy.ndarray)
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == y.dtype == host_array.dtype
    assert y.chunks == host_array.chunks
    np.testing.assert_allclose(result.get(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_numpy(name, arrays, strict_cupy):
    y, host_array = map(PROGRAMS[name], arrays)
    check(y, host_array, strict_cupy)


@pytest.mark.parametrize("name", SECTIONS)
def test_results_of_sections_are_of_cupy(name, arrays, strict_cupy):
    y, host_array = map(SECTIONS[name], arrays)
    assert isinstance(y._meta, strict_cupy.ndarray)
    assert (y.dtype, y.chunks) == (host_array.dtype, host_array.chunks)


@pytest.mark.parametrize("library", ["dask.array"], indirect=True)
@pytest.mark.parametrize("name", INSTALLED)
def test_the_methods_of_dask(name, arrays, strict_cupy):
    x, on_host = arrays
    with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install() as used:
        y = INSTALLED[name](x).persist(scheduler="sync")
    assert used.count == 1
    check(y, INSTALLED[name](on_host), strict_cupy)
