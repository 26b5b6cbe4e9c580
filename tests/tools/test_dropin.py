import gc
import inspect
from types import SimpleNamespace

import dask
import dask.array as da
import distributed.shuffle
import numpy as np
import pytest
from dask.array.overlap import map_overlap
from dask.array.utils import assert_eq, meta_from_array
from distributed import Client, Scheduler, Worker, futures_of
from distributed.shuffle._rechunk import rechunk_p2p

import dask_p2p
from dask_p2p import fft
from dask_p2p.config import installs_with_preload
from dask_p2p.errors import ConfigError, InputError, P2PWarning, RegistrationError
from dask_p2p.tools import dropin
from dask_p2p.tools import zarr_stores as dispatch
from tests.support import noted, persisted, spread, used

#: From eight slabs on Dask chooses p2p by itself where there is a client.
X = np.arange(64 * 48.0).reshape(64, 48)
SLABS = (8, -1)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    dask_p2p.uninstall()
    assert distributed.shuffle.rechunk_p2p is rechunk_p2p
    assert da.map_overlap is da.overlap.map_overlap is map_overlap


@pytest.fixture
def x():
    return da.from_array(X, chunks=SLABS)


def is_ours(y):
    return any(name.startswith("p2p-") for name in y.dask.layers)


def is_dasks(y):
    return any(name.startswith("rechunk-p2p-") for name in y.dask.layers)


def test_a_cluster_without_the_package_is_forgotten_with_its_scheduler(monkeypatch):
    """The client may find another scheduler later, with the package."""

    class Connection:
        """To which weak references can be made."""

    first, second = Connection(), Connection()
    client = SimpleNamespace(scheduler_comm=first)
    monkeypatch.setattr(dispatch, "current_client", lambda: client)
    requests = []

    def make():
        requests.append(client.scheduler_comm)
        raise RegistrationError("no dask_p2p there")

    with pytest.warns(P2PWarning, match="Dask's own function is used"):
        assert dispatch.try_replace("rechunk", make) is None
    assert dispatch.try_replace("rechunk", make) is None, "without a second warning"
    client.scheduler_comm = second
    assert dispatch.try_replace("rechunk", lambda: "made") == "made"
    assert requests == [first]


def test_what_is_replaced_has_the_same_parameters():
    """Another Dask may call it otherwise."""
    stock = inspect.signature(rechunk_p2p)
    assert [*stock.parameters][:2] == [*inspect.signature(dropin.rechunked).parameters][:2]
    assert all(p.kind is p.KEYWORD_ONLY for p in [*stock.parameters.values()][2:])
    stock, replacement = inspect.signature(map_overlap), inspect.signature(dropin.overlapped)
    assert [*stock.parameters] == [*replacement.parameters]
    assert [p.default for p in stock.parameters.values()] == [
        p.default for p in replacement.parameters.values()
    ]


def test_code_that_exists_uses_this_package(client, x):
    xarray = pytest.importorskip("xarray")
    x = spread(client, x)
    named = xarray.DataArray(x, dims=("a", "b"))
    operations = {
        "rechunk": lambda: x.rechunk({0: -1, 1: 6}),
        "function": lambda: da.rechunk(x, (-1, 6)),
        "transposed": lambda: x.T.rechunk((6, -1)),
        "xarray": lambda: named.chunk({"a": -1, "b": 6}).data,
    }
    for name, operation in operations.items():
        stock = operation()
        with dask_p2p.install():
            y = operation()
        assert is_dasks(stock), name
        assert (is_ours(y), is_dasks(y)) == (True, False), name
        assert (y.chunks, y.dtype) == (stock.chunks, stock.dtype), name
        assert type(meta_from_array(y)) is type(meta_from_array(stock)), name
        y = persisted(client, y)
        np.testing.assert_array_equal(y.compute(), X.T if name == "transposed" else X, name)
        assert used(client, y), name


def test_all_rechunks_that_move_bytes(client, x):
    calls = {
        "merged": lambda: x.rechunk((16, -1)),
        "transposed": lambda: x.T.rechunk((24, 32)),
        "function": lambda: da.rechunk(x, {0: 10}),
    }
    for name, call in calls.items():
        assert not is_ours(call())
        with dask_p2p.install(rechunk="all"):
            y = call()
        assert is_ours(y), name
        np.testing.assert_array_equal(y.compute(), X.T if name == "transposed" else X, name)
    with dask_p2p.install(rechunk="all") as used, dask_p2p.install() as other_installation:
        assert not is_ours(x.rechunk((4, -1))), "views"
        assert not is_ours(x.rechunk((16, -1), method="tasks"))
        with dask.config.set({"array.rechunk.method": "tasks"}):
            assert not is_ours(x.rechunk((16, -1)))
        other_installation.uninstall()
        assert is_ours(x.rechunk((16, -1)))
    assert used.counts == {"rechunk": 1}
    dask_p2p.install(rechunk="all")
    gc.collect()
    assert is_ours(x.rechunk((16, -1))), "as long as the installation lasts"
    with dask_p2p.install():
        dask_p2p.uninstall()
        assert not is_ours(x.rechunk((16, -1)))


def test_without_a_client(x):
    with dask_p2p.install(rechunk="all"):
        assert not is_ours(x.rechunk((16, -1)))
    with dask_p2p.install():
        assert not is_ours(x.rechunk((-1, 6)))
        y = x.rechunk((-1, 6), method="p2p")
    assert is_ours(y)
    assert_eq(y, X, scheduler="threads")


@pytest.mark.parametrize(
    ("dtype", "order"),
    [(">i4", None), (">f8", None), (">f8", ["comm"]), (">c16", None), (">U3", None)],
)
def test_byte_orders_of_arrays_that_a_client_sends(client, dtype, order):
    """Dask makes native blocks of many of them, and declares them as they were."""
    values = np.arange(64).reshape(8, 8).astype("i8").astype(dtype)
    a = spread(client, da.from_array(values, chunks=(2, 4)))
    (block, *_) = futures_of(a)
    assert client.submit(byte_order, block).result() == "="
    with dask.config.set({"p2p.transports.order": order or "auto"}):
        with dask_p2p.install():
            results = {"rechunk": a.rechunk((8, 1), method="p2p")}
            results["transposed"] = a.T.rechunk((8, 1), method="p2p")
        results["transpose"] = dask_p2p.transpose(a)
        results["overlap"] = dask_p2p.map_overlap(np.copy, a, depth={0: 1}, boundary="none")
    for name, y in results.items():
        y = persisted(client, y)
        orders = client.gather([client.submit(byte_order, block) for block in futures_of(y)])
        assert set(orders) == {">"}, name
        assert used(client, y) == {"comm"}, "the others move bytes as they are"
        expected = values.T if name.startswith("transpose") else values
        np.testing.assert_array_equal(y.compute(), expected, name)


def byte_order(block):
    return block.dtype.byteorder


def test_arrays_that_it_does_not_take_go_dasks_way(x):
    masked = da.ma.masked_greater(x, 100)
    unknown = x[x[:, 0] > 1000]
    with dask_p2p.install():
        for y in (masked, unknown):
            assert is_dasks(y.rechunk({1: 6}, method="p2p"))


def test_blocks_of_another_library_of_unknown_sizes(x):
    """They go by tasks: Dask's own way fails with blocks on GPUs."""
    unknown = x[x[:, 0] > 1000]
    with dask_p2p.install(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropin, "np", SimpleNamespace(ndarray=()))  # of which nothing is one
        y = unknown.rechunk({1: 6}, method="p2p")
    assert not is_dasks(y)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X[X[:, 0] > 1000])


def mean_of_three(block):
    return (block + np.roll(block, 1, 0) + np.roll(block, -1, 0)) / 3


def test_every_way_to_map_overlap(x):
    ways = {
        "method": lambda: x.map_overlap(mean_of_three, 1),
        "function": lambda: da.map_overlap(mean_of_three, x, depth=1, boundary="none"),
        "module": lambda: da.overlap.map_overlap(mean_of_three, x, depth={0: 1}),
    }
    for name, way in ways.items():
        stock = way()
        with dask_p2p.install() as used:
            y = way()
        assert used.counts == {"map_overlap": 1}, name
        assert is_ours(y), name
        assert not is_ours(way()), name
        assert_eq(y, stock, scheduler="sync")


#: What is done in Dask's place; the page on existing code tells the same.
CHANGES = {
    "always": {
        "gradient": lambda x, a: da.gradient(x, axis=0),
        "differentiate": lambda x, a: a.differentiate("t").data,
        "windows": lambda x, a: da.lib.stride_tricks.sliding_window_view(x, 3, axis=0),
        "rolling": lambda x, a: a.rolling(t=5).mean().data,
    },
    "method": {
        "quantile": lambda x, a: a.quantile(0.5, "t").data,
        "shift": lambda x, a: a.shift(t=1).data,
        "polyfit": lambda x, a: a.polyfit("t", 1).polyfit_coefficients.data,
        "median": lambda x, a: da.median(x, axis=0),
        "da.quantile": lambda x, a: da.quantile(x, 0.5, axis=0),
        "shuffle": lambda x, a: da.shuffle(x, [[*range(0, 64, 2)], [*range(1, 64, 2)]], 0),
        "gufunc": lambda x, a: da.apply_gufunc(
            np.sort, "(i)->(i)", x, axis=0, allow_rechunk=True, output_dtypes=float
        ),
        "fft2": lambda x, a: da.fft.fft2(x.rechunk(-1)),
        "blocks that do not fit": lambda x, a: x[:48].T + x[:48],
        "inv": lambda x, a: da.linalg.inv((x[:48] + 9_999 * da.eye(48, 8)).rechunk(16)),
    },
    "never": {
        "overlap": lambda x, a: da.overlap.overlap(x, 1, "none"),
        "groupby": lambda x, a: a.groupby(a.t % 3).mean().data,
        "coarsen": lambda x, a: a.coarsen(t=4).mean().data,
        "pad": lambda x, a: a.pad(t=2).data,
        "cumsum": lambda x, a: x.cumsum(axis=0),
        "topk": lambda x, a: da.topk(x, 3, axis=0),
        "product": lambda x, a: x @ x.T,
        "svd": lambda x, a: da.linalg.svd(x)[1],
        "qr": lambda x, a: abs(da.linalg.qr(x)[1]),
        "an order": lambda x, a: x[[*range(63, -1, -2)]],
        "reshape": lambda x, a: x.reshape(-1),
    },
}


@pytest.mark.parametrize("when", CHANGES)
def test_what_changes(x, when):
    xarray = pytest.importorskip("xarray")
    a = xarray.DataArray(x, dims=("t", "x"), coords={"t": np.arange(64.0)})
    for name, operation in CHANGES[when].items():
        stock = operation(x, a)
        with dask_p2p.install() as used:
            by_default = operation(x, a)
        assert (used.count > 0) is (when == "always"), name
        with dask.config.set({"array.rechunk.method": "p2p"}), dask_p2p.install() as used:
            by_method = operation(x, a)
        assert (used.count > 0) is (when != "never"), name
        for y in (by_default, by_method):
            assert y.chunks == stock.chunks, name
            actual, expected = dask.compute(y, stock, scheduler="sync")
            np.testing.assert_allclose(actual, expected, atol=1e-9, err_msg=name)


SMALL = [((0, 36, 12), (9,)), ((36, 0, 12), (4, 5)), ((36, 12, 0), (9,)), ((0, 0, 48), (1, 8))]
SMALL += [((1, 1, 1, 40, 5), (9,)), ((20, 1, 27), (3, 3, 3)), ((47, 1), (9, 0))]
SMALL += [((5,) * 9 + (3,), (9,))]


def slope(block):
    return np.gradient(block, axis=0)


@pytest.mark.parametrize("chunks", SMALL, ids=str)
@pytest.mark.parametrize("case", [(True, "reflect"), (True, "none"), (False, "reflect")])
def test_small_blocks_of_several_arrays(chunks, case):
    trim, boundary = case
    x = da.from_array(X[:48, :9].copy(), chunks=(48, 9)).rechunk(chunks, method="tasks")
    small_blocks = da.from_array(X[:48, 20:29].copy(), chunks=(10, 3))
    row = small_blocks[0]

    def difference(*blocks):
        return sum(slope(block) if block.ndim == 2 else block for block in blocks)

    def inner(*blocks):
        return difference(*blocks)[2:-2]

    function = difference if trim else inner
    options = {"boundary": boundary, "trim": trim, "dtype": float, "token": "several"}
    for arrays, depth in (
        ((x, small_blocks), {0: 2}),
        ((x, row), [{0: 2}, 0]),
        ((x, x + 1, small_blocks), [{0: 2}] * 3),
        ((x,), {0: 2}),
    ):
        stock = da.map_overlap(function, *arrays, depth=depth, **options)
        with dask_p2p.install() as used:
            y = da.map_overlap(function, *arrays, depth=depth, **options)
        assert used.count == 1
        assert y.chunks == stock.chunks
        actual, expected = dask.compute(y, stock, scheduler="sync")
        np.testing.assert_array_equal(actual, expected)


def test_small_blocks_that_must_stay():
    x = da.from_array(X[:48], chunks=((0, 36, 12), (48,)))
    with dask_p2p.install() as used:
        with pytest.raises(ValueError, match="allow_rechunk=True"):  # Dask's own
            x.map_overlap(slope, {0: 1}, dtype=float, allow_rechunk=False)
        y = x.map_overlap(slope, {1: 1}, dtype=float, allow_rechunk=False)
    assert used.count == 1
    np.testing.assert_array_equal(y, slope(X[:36]).tolist() + slope(X[36:48]).tolist())


def test_overlaps_that_it_does_not_take_go_dasks_way(x):
    masked = da.ma.masked_greater(x, 100)
    unknown = x[x[:, 0] >= 0]  # all of them
    with dask_p2p.install() as used:
        y = masked.map_overlap(np.negative, (1, 0))
        with pytest.raises(AssertionError):  # Dask's own
            unknown.map_overlap(np.negative, (1, 0))
        with pytest.raises(ValueError, match="larger than your array"):  # Dask's own, too
            x.map_overlap(np.negative, 1_000)
    assert used.count == 0
    assert not is_ours(y)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), -masked.compute(scheduler="sync"))


def test_what_was_done_in_dasks_place_is_counted(x):
    with dask_p2p.install() as used:
        assert repr(used) == "<dask_p2p in Dask's place: nothing yet>"
        x.rechunk((-1, 6), method="p2p")
        x.rechunk((-1, 6), method="tasks")
        with dask_p2p.install() as inner:
            x.rechunk((-1, 6), method="p2p").map_overlap(np.negative, 1)
        da.ma.masked_greater(x, 100).rechunk({1: 6}, method="p2p")
    x.rechunk((-1, 6), method="p2p")
    assert used.counts == {"rechunk": 2, "map_overlap": 1}
    assert used.count == 3
    assert repr(used) == "<dask_p2p in Dask's place: rechunk 2, map_overlap 1>"
    assert inner.count == 2


def is_installed():
    return distributed.shuffle.rechunk_p2p is not rechunk_p2p


def test_a_lasting_installation_of_a_library():
    with dask_p2p.install():
        library = dask_p2p.install()
    assert is_installed()
    with dask_p2p.install():
        library.uninstall()
        library.uninstall()  # changes nothing
        library.__exit__(None, None, None)
        assert is_installed()
    assert not is_installed()
    dask_p2p.install()
    del library
    gc.collect()
    with dask_p2p.install():
        pass
    assert is_installed(), "nobody keeps it, and it lasts"
    dask_p2p.uninstall()
    assert not is_installed()


def test_one_installation_entered_again(x):
    installation = dask_p2p.install()
    with installation, installation:
        x.rechunk((-1, 6), method="p2p")
    assert not is_installed()
    with installation as again:
        assert is_installed()
        dask_p2p.uninstall()
        assert is_installed()
        x.rechunk((-1, 6), method="p2p")
        installation.uninstall()
        assert not is_installed()
    assert again is installation
    assert installation.count == 2
    with dask_p2p.install():
        x.rechunk((-1, 6), method="p2p")
    assert installation.count == 2, "it has ended"


def test_an_installation_that_fails_replaces_nothing(monkeypatch):
    monkeypatch.delattr(da.fft, "irfftn")
    with pytest.raises(AttributeError):
        dask_p2p.install()
    assert not is_installed()
    assert da.map_overlap is map_overlap


def test_others_replace_the_same_function(x):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        noted(patch, distributed.shuffle, "rechunk_p2p", lambda *_, **__: calls.append("before"))
        dask_p2p.install()
        noted(patch, distributed.shuffle, "rechunk_p2p", lambda *_, **__: calls.append("after"))
        after = distributed.shuffle.rechunk_p2p
        assert is_ours(x.rechunk((-1, 6), method="p2p"))
        dask_p2p.uninstall()
        assert distributed.shuffle.rechunk_p2p is after
        assert is_dasks(x.rechunk((-1, 6), method="p2p"))
    assert calls == ["after", "after", "before"]


def test_transforms_of_axes_that_are_cut():
    values = np.random.default_rng(0).random((8, 6))
    cut, uncut = da.from_array(values, chunks=3), da.from_array(values)
    names = [name for name in fft.__all__ if not name.endswith(("freq", "shift", "estimate"))]
    with dask_p2p.install() as used:
        for name in names:
            function, expected = getattr(da.fft, name), getattr(np.fft, name)
            assert_eq(function(cut), expected(values))
            options = {"axes": (0, 1)} if name[-1] in "2n" else {"axis": 0}
            assert_eq(
                function(cut, norm="ortho", **options), expected(values, norm="ortho", **options)
            )
            s = 5 if name[-1] == "t" else (5, 4)
            assert_eq(function(cut, s, *options.values()), expected(values, s, *options.values()))
        assert_eq(np.fft.fft(cut, n=5), np.fft.fft(values, n=5))  # which Dask is asked for
        assert used.counts == {"fft": 3 * len(names) + 1}
        assert_eq(da.fft.fft(uncut), np.fft.fft(values))
        with pytest.warns(DeprecationWarning, match="axes"):
            stock = da.fft.fftn(uncut[..., None], (5, 4))
        with pytest.raises(ValueError, match="Duplicate axes"):
            da.fft.fftn(cut, axes=(0, 0))
        assert used.count == 3 * len(names) + 1
        first = da.fft.fftn(cut[..., None], (5, 4))
        assert_eq(first, stock)
    with pytest.raises(ValueError, match="single chunk"):
        da.fft.fft(cut)


@pytest.mark.parametrize("prefix", [True, False])
def test_by_preload_in_a_client(cluster, x, prefix):
    preloads = {"distributed.client.preload": ["dask_p2p.preload"], "p2p.install": prefix}
    with dask.config.set(preloads), Client(cluster):
        assert is_ours(x.rechunk((-1, 6))) is prefix
    assert is_ours(x.rechunk((-1, 6), method="p2p")) is prefix


async def test_by_preload_on_a_worker():
    """Its tasks may make arrays."""
    nothing = {"dashboard_address": ":0", "preload": ["dask_p2p.preload"]}
    with dask.config.set({"p2p.install": True}):
        async with Scheduler(**nothing) as scheduler:
            assert not is_installed()
            async with Worker(scheduler.address, **nothing):
                assert is_installed()


def test_wrong_options_are_refused():
    with pytest.raises(InputError, match=r"expected rechunk='p2p' or 'all', got 'tasks'\. Leave"):
        dask_p2p.install(rechunk="tasks")
    with (
        dask.config.set({"p2p.install": "of course"}),
        pytest.raises(ConfigError, match=r"p2p.install is 'of course': expected true or false"),
    ):
        installs_with_preload()
