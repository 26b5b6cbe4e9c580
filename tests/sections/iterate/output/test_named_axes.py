"""Names of the axes of frames, and coordinates along them."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Record, Save
from dask_p2p.errors import InputError, P2PWarning
from tests.sections.iterate.output.test_stores import A, B, array, run_here

xr = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr")


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
    assert {*dataset.data_vars} == {"u"}
    assert {*dataset.coords} == {"frame", "step", "t"}
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
