from __future__ import annotations

from importlib.util import find_spec

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p import versions
from dask_p2p.errors import P2PWarning
from tests.support import indexed, output_of, persisted, spread, used

pytestmark = pytest.mark.skipif(
    find_spec("dask_array") is None, reason="needs it: pip install dask-array"
)

VALUES = indexed((64, 48)).astype(float)


@pytest.fixture
def x(dask_array):
    """From eight slabs on Dask chooses p2p by itself where there is a client."""
    return dask_array.from_array(VALUES, chunks=(8, -1)).persist(scheduler="sync")


@pytest.fixture(autouse=True)
def _as_before(dask_array):
    rules = [dask_array._rechunk.Rechunk._lower, dask_array._overlap.MapOverlap._lower]
    yield
    dask_p2p.uninstall()
    assert rules == [dask_array._rechunk.Rechunk._lower, dask_array._overlap.MapOverlap._lower]


def names(y):
    """Beginnings of the names of an array's tasks, without numbers and the input's."""
    found = {str(key[0]).rpartition("-")[0] for key in y.__dask_graph__() if key[0] != y.name}
    return sorted(name for name in found if not name.startswith("array"))


def test_code_that_exists_uses_this_package(client, x):
    x = spread(client, x)
    calls = {
        "rechunk": (lambda: x.rechunk((-1, 6)), VALUES, ["p2p-rechunk"]),
        "method": (lambda: x.rechunk((20, 20), method="p2p"), VALUES, ["p2p-rechunk"]),
        "T": (lambda: x.T.rechunk((6, -1)), VALUES.T, ["p2p-transpose"]),
        "T by method": (lambda: x.T.rechunk((20, 20), method="p2p"), VALUES.T, ["p2p-transpose"]),
        "afterwards": (lambda: x.rechunk((-1, 6)).T, VALUES.T, ["p2p-transpose"]),
        "overlap": (lambda: x.map_overlap(np.negative, 1), -VALUES, ["p2p-overlap"]),
    }
    for name, (call, wanted, tasks) in calls.items():
        stock = call()
        with dask_p2p.install():
            y = call()
            assert y.chunks == stock.chunks, name
            assert names(y) == tasks, name
            done = persisted(client, y)
            assert used(client, y), name
        np.testing.assert_array_equal(done.compute(), wanted, name)


def test_an_array_that_others_need_is_rechunked_once(client, x):
    with dask_p2p.install():
        y = x.rechunk((-1, 6))
        total = y + y.T.T + y.T.sum()
        assert [name for name in names(total) if name.startswith("p2p")] == ["p2p-rechunk"]
        np.testing.assert_array_equal(total.compute(), 2 * VALUES + VALUES.sum())


def test_the_optimiser_goes_first(client, dask_array):
    """A rechunk of an array from memory is a cut of it, and so takes no exchange."""
    x = dask_array.from_array(VALUES, chunks=(8, -1))
    with dask_p2p.install() as used:
        y = ((x + 1).T * 2).rechunk((6, -1))
        np.testing.assert_array_equal(y.compute(), 2 * (VALUES.T + 1))
        y = (x + 1).rechunk((-1, 6)).T
        np.testing.assert_array_equal(y.compute(), VALUES.T + 1)
        part = x.map_overlap(np.negative, 2)[:4]
        assert len([key for key in part.__dask_graph__() if "overlap" in str(key)]) == 1
        np.testing.assert_array_equal(part.compute(), -VALUES[:4])
    assert used.counts == {"map_overlap": 1}
    other = dask_array.from_array(VALUES, chunks=(16, -1))
    with dask_p2p.install(rechunk="all") as used:  # the sum rechunks one of the two
        np.testing.assert_array_equal((x + other).compute(), 2 * VALUES)
    assert not used.count


#: Maps with halos that are no `MapOverlap`: the shape of the result follows from arguments.
OF_OTHER_SHAPE = {
    "new last axis": (
        lambda x, **given: x.map_overlap(lambda a: a[..., None], depth=1, new_axis=2, **given),
        VALUES[..., None],
    ),
    "new first axis": (
        lambda x, **given: x.map_overlap(lambda a: a[None], depth=1, new_axis=0, **given),
        VALUES[None],
    ),
    "dropped axis": (
        lambda x, **given: x.map_overlap(
            lambda a: a.max(axis=1), depth={0: 2}, drop_axis=1, **given
        ),
        VALUES.max(axis=1),
    ),
    "another axis": (
        lambda x, **given: x.map_overlap(
            lambda a: a.max(axis=1)[None], depth={0: 2}, drop_axis=1, new_axis=0, **given
        ),
        VALUES.max(axis=1)[None],
    ),
}


@pytest.mark.parametrize("boundary", ["none", "periodic", "reflect", "nearest", 0])
@pytest.mark.parametrize("call", OF_OTHER_SHAPE)
def test_overlaps_that_change_axes(call, boundary, x):
    """`dask_array` alone computes other values for some of them, and for others other shapes."""
    make, wanted = OF_OTHER_SHAPE[call]
    with dask_p2p.install() as used:
        y = make(x, boundary=boundary)
    assert used.counts == {"map_overlap": 1}
    assert y.shape == wanted.shape
    assert "p2p-overlap" in names(y)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), wanted)
    np.testing.assert_array_equal(y[:1].compute(scheduler="sync"), wanted[:1])


def test_windows(dask_array, x):
    windows = np.lib.stride_tricks.sliding_window_view(VALUES, 5, axis=0)
    with dask_p2p.install() as used:
        y = dask_array.sliding_window_view(x, 5, axis=0)
        assert "p2p-overlap" in names(y)
        assert used.counts == {"map_overlap": 1}
        np.testing.assert_array_equal(y.compute(scheduler="sync"), windows)
        mean = y.mean(axis=-1).compute(scheduler="sync")
        np.testing.assert_allclose(mean, windows.mean(axis=-1))


@pytest.mark.parametrize("boundary", ["none", "periodic", "reflect", "nearest", 7])
def test_blocks_with_halos(boundary, dask_array, x):
    wanted = dask_array.overlap(x, {0: 2, 1: 1}, boundary).compute(scheduler="sync")
    with dask_p2p.install() as used:
        y = dask_array.overlap(x, {0: 2, 1: 1}, boundary)
        np.testing.assert_array_equal(y.compute(scheduler="sync"), wanted)
    assert used.counts == {"map_overlap": 1}


def test_transforms_of_axes_that_are_cut(dask_array, x):
    with pytest.raises(ValueError, match="single chunk"):
        dask_array.fft.fft2(x)
    with dask_p2p.install() as used:
        y = dask_array.fft.fft2(x)
        dask_array.fft.fft(x)  # of a whole axis
    assert used.counts == {"fft": 1}
    np.testing.assert_allclose(y.compute(scheduler="sync"), np.fft.fft2(VALUES), atol=1e-8)


def test_all_rechunks_that_move_bytes(client, x):
    with dask_p2p.install(rechunk="all") as used:
        for y, is_taken in (
            (x.rechunk((16, -1)), True),
            (x.rechunk((16, -1), method="tasks"), False),
            (x.rechunk((4, -1)), False),  # views
        ):
            assert ("p2p-rechunk" in names(y)) == is_taken
            np.testing.assert_array_equal(y.compute(), VALUES)
    assert used.counts == {"rechunk": 1}


def masked(block):
    return np.ma.masked_greater(block, 100)


def test_arrays_that_it_does_not_take_go_dasks_way(dask_array, x):
    y = x.map_blocks(masked, meta=np.ma.masked_array(np.zeros((0, 0))))
    unknown = x[x.min(axis=1) < 1000].rechunk({1: 5}, method="p2p")
    with dask_p2p.install() as used:
        assert not any("p2p-" in name for name in names(y.map_overlap(np.negative, 1)))
        assert names(unknown) != ["p2p-rechunk"]
    assert not used.count


def test_what_is_planned_after_the_end_is_dasks(client, x):
    with dask_p2p.install():
        y = x.rechunk((-1, 6))
    assert not any(name.startswith("p2p-") for name in names(y))
    with dask_p2p.install():
        assert names(x.rechunk((-1, 6))) == ["p2p-rechunk"], "though it was planned before"


def test_an_unsupported_release_stays_as_it_is(monkeypatch, client, x):
    monkeypatch.setattr(versions, "DASK_ARRAY_RELEASES", "<0.1")
    versions.check_dask_array.cache_clear()
    try:
        with pytest.warns(P2PWarning, match="dask_array's own functions are used"):
            dask_p2p.install()
    finally:
        versions.check_dask_array.cache_clear()
    assert not any(name.startswith("p2p-") for name in names(x.rechunk((-1, 6))))


@pytest.mark.programs
def test_an_import_after_install():
    program = """
import numpy as np, dask_p2p
with dask_p2p.install() as used:
    import dask_array as da
    y = da.fft.fft2(da.ones((8, 8), chunks=4))
assert used.counts == {"fft": 1}
assert y.compute(scheduler="sync")[0, 0] == 64
"""
    output_of("-W", "error", "-c", program)


def test_options_of_dask_hold(client, x):
    with dask.config.set({"array.rechunk.method": "tasks"}), dask_p2p.install(rechunk="all"):
        y = x.rechunk((-1, 6))
    assert not any(name.startswith("p2p-") for name in names(y))
