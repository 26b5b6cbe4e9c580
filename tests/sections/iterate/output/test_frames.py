"""Frames of regions, computed fields, the thread that writes them, and stores at URLs."""

import builtins
import shutil
import sys
import threading
import warnings
from itertools import accumulate

import dask
import dask.array as da
import numpy as np
import pytest
import zarr

from dask_p2p import Checkpoint, Field, Record, Save, errors, iterate
from dask_p2p.errors import InputError, MissingPackageError, P2PWarning
from dask_p2p.sections.iterate.output.frames import Frames
from tests.sections.iterate.output.test_stores import A, B, fields, run_here, states
from tests.sections.iterate.test_coupled import array, react
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, noted

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def frames_of(path):
    group = zarr.open(path, mode="r")
    return {name: array[...] for name, array in group.arrays()}


REGIONS = [np.s_[::2], np.s_[3:21, ::5], np.s_[1:, -7:-1], np.s_[9:10, :], np.s_[5::7, 2:]]


@pytest.mark.parametrize(
    ("region", "chunks"),
    [*zip(REGIONS, [((8, 8, 8), (10, 10)), ((8, 12, 4), (5, 5, 10)), (24, 20)] * 2, strict=False)],
)
def test_regions(client, tmp_path, region, chunks):
    save = Save(tmp_path, 2, region=region)
    dask.compute(iterate(react, fields(chunks), 1, 7, save=save, ranks=4))
    frames, expected = frames_of(tmp_path), states(6)
    for name in "uv":
        for frame in range(3):
            assert np.array_equal(frames[name][frame], expected[2 * frame + 2][name][region])


def difference(u, c, at, scale):
    """Return a field of values with halo, a constant with halo, and the position."""
    across = u[2:, 1:-1] - u[:-2, 1:-1] + c[1:-1, 2:]
    return scale * across + at.index[0] + 100 * at.step


def difference_of(u, c, step):
    u, c = np.pad(u, 1, mode="wrap"), np.pad(c, ((0, 0), (1, 1)), mode="edge")
    across = u[2:, 1:-1] - u[:-2, 1:-1] + c[:, 2:]
    return 3 * across + np.arange(24)[:, None] + 100 * step


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("region", [(), np.s_[2::3, :15]])
def test_computed_fields(client, tmp_path, ranks, region):
    compute = {"d": difference, "ready": lambda u: u > 0.2, "both": lambda v: v * 1j}
    save = Save(tmp_path, 2, fields=[], region=region, compute=compute)
    options = {"constants": {"c": Field(A, depth=1, boundary="nearest")}, "scale": 3}
    (result,) = dask.compute(iterate(react, fields(), 1, 5, save=save, ranks=ranks, **options))
    expected, frames = states(5), frames_of(tmp_path)
    assert np.array_equal(result["u"], expected[5]["u"])
    assert (frames["ready"].dtype, frames["both"].dtype) == (bool, complex)
    for frame, step in enumerate((2, 4)):
        state = expected[step]
        d = difference_of(state["u"], A, step - 1)
        assert np.array_equal(frames["d"][frame], d[region])
        assert np.array_equal(frames["ready"][frame], (state["u"] > 0.2)[region])
        assert np.array_equal(frames["both"][frame], (state["v"] * 1j)[region])


def computed(tmp_path, function, ranks, steps=2):
    """Return frames of a computed field; the first ones have zeros alone."""
    fields = {"u": array(A * 0, (8, 10)), "c": array(A, (8, 10))}

    def filled(u, c, at):
        return {"u": u[1:-1, 1:-1] + c[1:-1, 1:-1] * (at.step > 0)}

    save = Save(tmp_path / str(ranks), 1, [], compute={"anomaly": function})
    dask.compute(iterate(filled, fields, 1, steps, save=save, ranks=ranks))
    return frames_of(tmp_path / str(ranks))["anomaly"]


@pytest.mark.parametrize(
    "function",
    [
        lambda u: u - u[1:-1, 1:-1].mean(),
        lambda u: np.gradient(np.gradient(u, axis=0), axis=0),
        lambda u, at: u[1:-1, 1:-1] + at.box[0][0],
    ],
)
def test_computed_fields_that_depend_on_the_number_of_ranks_are_named(client, tmp_path, function):
    with pytest.warns(P2PWarning, match=r"compute\['anomaly'\] returns other .* number of ranks"):
        result = computed(tmp_path, function, 3)
    assert not np.allclose(result, computed(tmp_path, function, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda u: np.gradient(u, axis=1),
        lambda u, at: (u[1:-1, 1:-1] * at.index[0] + at.shape[1]) > 0.3,
    ],
)
def test_other_computed_fields_are_compared_without_a_word(client, tmp_path, recwarn, function):
    assert np.array_equal(computed(tmp_path, function, 3), computed(tmp_path, function, 1))
    assert not [warning for warning in recwarn if issubclass(warning.category, P2PWarning)]


def test_the_thread_writes_while_steps_go_on(tmp_path, monkeypatch):
    """The first frame is written when the second step has been made, and not by its thread."""
    may_write = threading.Event()

    def wait_in_thread(*_):
        assert may_write.wait(BOUND_S)
        return threading.current_thread()

    def step(u, at):
        if at.step == 1:
            may_write.set()
        return u + 1

    threads = noted(monkeypatch, Frames, "write_part", wait_in_thread)
    run_here(step, {"u": array(A, 8)}, 0, 4, save=Save(tmp_path, 1))
    assert np.array_equal(frames_of(tmp_path)["u"], list(accumulate([1] * 4, initial=A))[1:])
    assert len({*threads}) == 1
    assert threads[0] not in threading.enumerate()


def test_errors_of_the_thread_are_raised_on_all_ranks(client, tmp_path):
    """One rank of two cannot write its last frame; the run ends by name."""

    def step(u, at, folder):
        if at.step == 3 and at.box[0][0] > 0:
            chunks = folder / "frames" / "u" / "c" / "1"
            chunks.mkdir(parents=True, exist_ok=True)
            (chunks / "1").write_text("a file in the place of this rank's folder")
        return u + 1

    options = {"save": Save(tmp_path / "frames", 2), "ranks": 2, "folder": tmp_path}
    with pytest.raises(errors.FileError, match="Make room, or give another path"):
        dask.compute(iterate(step, {"u": array(A, ((12, 12), 20))}, 0, 6, **options))
    assert zarr.open(tmp_path / "frames", mode="r").attrs["frames"] <= 1
    nothing_is_left(client)


# --- URLs


def test_stores_at_urls(tmp_path):
    """All ranks are in this process, whose memory `memory://` names."""
    expected = states(9)
    for url in (f"file://{tmp_path}/files", "memory://dask-p2p-test"):
        save, checkpoint = Save(f"{url}/frames", 2), Checkpoint(f"{url}/states", every=3, keep=1)
        for steps in (4, 9):
            result = run_here(react, fields(), 1, steps, save=save, checkpoint=checkpoint)
            assert np.array_equal(result["u"], expected[steps]["u"])
        group = zarr.open_group(f"{url}/frames", mode="r")
        assert group.attrs["frames"] == 4
        for frame in range(4):
            assert np.array_equal(group["v"][frame], expected[2 * frame + 2]["v"])
        with pytest.raises(InputError, match="frames of the same fields"):
            run_here(react, fields(), 1, 9, save=Save(f"{url}/frames", 3))
        new = Checkpoint(f"{url}/states", every=3, resume=False)
        with pytest.raises(InputError, match="because of resume=False"):
            run_here(react, fields(), 1, 9, checkpoint=new)
    names = {path.name for path in (tmp_path / "files" / "states").iterdir()}
    assert names == {"step-000000000009", "step-000000000009.complete"}


def test_urls_need_packages(monkeypatch):
    def lazy(path):
        return iterate(react, fields(), 1, 4, save=Save(path, 2))

    with pytest.raises(InputError, match="a URL that fsspec opens, got 'nowhere://frames'"):
        lazy("nowhere://frames")
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("s3fs", "requests", "aiohttp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "s3fs", raising=False)
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(MissingPackageError, match="not installed: Install s3fs"):
            lazy("s3://bucket/frames")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingPackageError, match="the package fsspec, which is not installed"):
        lazy("memory://frames")


# --- refused


def test_wrong_regions_and_functions_are_refused():
    def refused(message, **options):
        with pytest.raises(InputError, match=message):
            iterate(lambda u: u, {"u": array(A, 8)}, 0, 2, save=Save("frames", 2, **options))

    refused("a tuple of slices with positive steps", region=(slice(None, None, -1),))
    refused("a tuple of slices with positive steps", region=(slice(0.5),))
    refused("at most 2", region=(slice(5),) * 3)
    refused("slices that select elements", region=np.s_[30:])
    refused("a name that no field has", compute={"u": lambda u: u})
    refused("without a parameter out", compute={"d": lambda u, out: u})
    refused("parameters with the names of fields", compute={"d": lambda w: w})
    refused("names of fields", fields=[])


def test_wrong_values_of_computed_fields_are_refused(tmp_path):
    def refused(message, function):
        save = Save(tmp_path / "frames", 1, compute={"d": function})
        with pytest.raises(errors.BlockMismatchError, match=message):
            run_here(lambda u: u + 1, {"u": array(A, 8)}, 0, 3, save=save)

    refused(r"of shape \(24, 20\).*'d', got \(\)\. .* record a number", lambda u: u.sum())
    refused(r"'d', got \(23, 20\)", lambda u: u[1:])
    refused("got list", lambda u: [u])
    refused("that become bool", lambda u, at: u if at.step else u > 0)


def test_another_region_of_a_store_is_refused(tmp_path):
    def run(region):
        run_here(lambda u: u, {"u": array(A, 8)}, 0, 2, save=Save(tmp_path, 2, region=region))

    run(np.s_[:12])
    run(np.s_[:12])
    for region, message in (
        (np.s_[12:], r"got region \[\[0, 12, 1\].* in place of \[\[12, 24, 1\]"),
        ((), r"region \[\[0, 12, 1\].* in place of None\. Give"),
    ):
        with pytest.raises(InputError, match=message):
            run(region)


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])  # in two versions of Zarr's format
def test_frames_after_the_checkpoint_are_empty_until_they_are_written(tmp_path, dtype):
    def step(u, at):
        if at.step == 4:
            np.save(tmp_path / "frames.npy", frames_of(tmp_path / "frames")["u"])
        return u + 1

    stores = {"save": Save(tmp_path / "frames", 1), "checkpoint": Checkpoint(tmp_path / "at", 4)}
    for steps in (7, 9):
        fields = {"u": da.zeros(4, chunks=2, dtype=dtype)}
        run_here(step, fields, 0, steps, boundary="none", **stores)
    first_items = np.load(tmp_path / "frames.npy")[:, 0]
    np.testing.assert_array_equal(first_items, [1, 2, 3, 4, *[np.nan] * 5])


def test_bits_of_negative_zeros(tmp_path):
    """Zarr takes -0j for the fill value 0j, and omits such chunks by default."""
    zeros = np.full(20, complex(-0.0, -0.0))
    fields = {"u": da.from_array(zeros, chunks=10), "t": complex(-0.0, -0.0)}
    record = {"first": Record(lambda u: u[0], dtype=complex)}
    options = {"save": Save(tmp_path / "frames", 1), "record": record, "boundary": "none"}
    for steps in (1, 2):  # the second run resumes from the checkpoint of the first one
        options["checkpoint"] = Checkpoint(tmp_path / "states", every=1)
        result = run_here(lambda u, t: {"u": u, "t": t}, fields, 0, steps, **options)
    for name, shape in (("u", (20,)), ("t", ())):
        expected = np.full(shape, zeros[0]).tobytes()
        assert np.asarray(result[name]).tobytes() == expected
        assert frames_of(tmp_path / "frames")[name][1].tobytes() == expected
    assert result["first"].tobytes() == zeros[:2].tobytes()


xr = pytest.importorskip("xarray")


def saved(save, fields=None, steps=2):
    fields = {"u": array(A, (12, 10)), "v": array(B, (12, 10))} if fields is None else fields
    run_here(lambda u, v: {"u": u + 1, "v": v}, fields, 0, steps, save=save)


def opened(path):
    return xr.open_zarr(path, consolidated=False)


def test_names_and_coordinates(tmp_path):
    y = xr.DataArray(np.arange(24.0), dims="y", attrs={"units": "m"})
    saved(Save(tmp_path, 1, region=np.s_[::4], dims=["y", "x"], coords={"y": y}))
    dataset = opened(tmp_path)
    assert dataset.v.dims == ("frame", "y", "x")
    assert dataset.y.values.tolist() == [0, 4, 8, 12, 16, 20]
    assert dataset.y.attrs == {"units": "m"}


def test_fields_on_faces_have_axes_of_their_own(tmp_path):
    faces = array(np.zeros((25, 20)), ((12, 13), (10, 10)))
    saved(Save(tmp_path, 1, dims=["y", "x"]), {"u": array(A, (12, 10)), "v": Field(faces)})
    assert opened(tmp_path).v.dims == ("frame", "y_v", "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ["y"]}, "expected 2 different names"),
        ({"dims": ["y", "y"]}, "expected 2 different names"),
        ({"dims": ["frame", "y"]}, "none of them 'frame'"),
        ({"coords": {"z": [1, 2]}}, "one-dimensional arrays of numbers"),
        ({"coords": {"dim_0": np.zeros(20)}}, "as long as the axes"),
        ({"coords": {"dim_0": ["a"] * 24}}, "one-dimensional arrays of numbers"),
        ({"dims": ["u", "x"], "coords": {"u": np.zeros(24)}}, "one-dimensional arrays"),
    ],
)
def test_wrong_names_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        saved(Save("frames", 1, **options))


def test_frames_have_their_steps_and_times(tmp_path):
    def step(u, t):
        return {"u": u + 1, "t": t + 0.5}

    fields = {"u": array(A, (12, 10)), "t": 0.0}
    run_here(step, fields, 0, 50, save=Save(tmp_path, 5, fields=["u"]))
    dataset = opened(tmp_path)
    assert ({*dataset.data_vars}, {*dataset.coords}) == ({"u"}, {"frame", "step", "t"})
    assert dataset.step.values.tolist() == [*range(5, 51, 5)]
    assert dataset.t.values.tolist() == [step / 2 for step in range(5, 51, 5)]
    some = dataset.u.isel(frame=[0, 5, 9])
    assert some.frame.values.tolist() == [0, 5, 9]
    assert some.swap_dims(frame="step").sel(step=30).t == 15
    np.testing.assert_allclose(some.swap_dims(frame="t").sel(t=15), A + 30)


def test_names_of_fields_and_axes_are_not_those_of_coordinates(tmp_path):
    fields = {"u": array(A, (12, 10)), "step": 0, "t": array(B, (12, 10))}
    save = Save(tmp_path, 1, dims=["y", "time"])
    run_here(lambda u, step, t: {"step": step + 2}, fields, 0, 3, save=save)
    dataset = opened(tmp_path)
    assert {*dataset.coords} == {"frame"}
    assert dataset["step"].values.tolist() == [2, 4, 6]
    with pytest.raises(InputError, match="a value for each of 6 frames, got 3 in 'frame'"):
        saved(Save(tmp_path / "few", 1, coords={"frame": [0.0, 1.0, 2.0]}), steps=6)


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])  # big-endian: Zarr's version 2
def test_only_frames_of_the_run_are_visible(tmp_path, dtype):
    fields = {"u": array(A.astype(dtype), (12, 10))}

    def run(folder, steps, stop=-1, copy=None):
        def step(u, at):
            if at.step == stop:
                raise InputError("stopped")
            return {"u": (u + 1).astype(dtype)}

        def record(at):
            if copy is not None and at.step == 12:
                shutil.copytree(tmp_path / folder, copy)  # as if the job were killed then
            return 0.0

        options = {
            "save": Save(tmp_path / folder / "frames", 2),
            "checkpoint": Checkpoint(tmp_path / folder / "states", every=4),
            "record": {"none": Record(record)},
        }
        run_here(step, fields, 0, steps, **options)

    with pytest.raises(InputError, match="stopped"):
        run("ended", 100, stop=15, copy=tmp_path / "killed")
    assert opened(tmp_path / "ended" / "frames").sizes["frame"] == 6  # the last one is not recorded
    assert zarr.open(tmp_path / "killed" / "frames", mode="r")["u"].shape[0] == 50
    for folder in ("ended", "killed"):
        with warnings.catch_warnings(action="ignore", category=P2PWarning):  # of its functions
            run(folder, 17)
        dataset = opened(tmp_path / folder / "frames")
        assert dataset.step.values.tolist() == [*range(2, 17, 2)]
        assert dataset.attrs["frames"] == 8
        np.testing.assert_allclose(dataset.u[:, 0, 0], A[0, 0] + dataset.step)
        names = {path.name.partition(".")[0] for path in (tmp_path / folder / "frames/u").iterdir()}
        if dtype == ">f8":
            assert {name for name in names if name.isdigit()} == {*map(str, range(8))}


def test_a_run_that_ends_early_has_as_many_frames(tmp_path):
    def run(last):
        record = {"size": lambda u: u.size}
        options = {"record": record, "until": lambda numbers: numbers["size"] > 0 and last}
        run_here(lambda u: u + 1, {"u": array(A, 8)}, 0, 6, save=Save(tmp_path, 1), **options)

    run(last=False)
    assert opened(tmp_path).u.shape == (6, *A.shape)
    run(last=True)
    dataset = opened(tmp_path)
    assert dataset.step.values.tolist() == [1]
    assert dataset.u.shape == (1, *A.shape)
