"""Frames of the state of a loop of steps."""

from __future__ import annotations

import resource
import threading
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Save, spmd
from dask_p2p.errors import FileError, InputError
from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.iterate.output.checkpoints import CheckpointFiles
from dask_p2p.sections.iterate.output.frames import Frames
from tests.sections.gangs import run_gang
from tests.sections.iterate.output.test_state_files import StoppedError, U, grid

zarr = pytest.importorskip("zarr")

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


def program(path, steps=12, stop=None, files=None, **options):
    """Return a function of a rank that saves frames every three steps, and may stop."""

    def run(ctx):
        block = U[box_slices(ctx.box)]
        s = ctx.state(u=block, fields={"v": block * 0}, t=0.5, mine=np.zeros(ctx.rank + 1))
        options_of_steps = {} if files is None else {"checkpoint": Checkpoint(str(files), every=4)}
        save = Save(str(path), 3, **options)
        for step in ctx.steps(steps, s, save=save, **options_of_steps):
            if step == stop:
                raise StoppedError
            s.u = s.u * 1.5 + s.t
            s.fields["v"] += s.u
            s.t += 0.25

    return run


def states(steps=12):
    """Return the state after each step, of the whole arrays."""
    u, v, t, states = U.copy(), U * 0, 0.5, []
    for _ in range(steps):
        u = u * 1.5 + t
        v = v + u
        t += 0.25
        states.append((u, v, t))
    return states


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_resumes_adds_frames(tmp_path, ranks):
    frames, files = tmp_path / "frames", tmp_path / "states"
    with pytest.raises(StoppedError):
        run_gang(grid(ranks), program(frames, stop=10, files=files))
    assert zarr.open(frames, mode="r").attrs["frames"] == 2  # no rank has recorded the third
    run_gang(grid(ranks), program(frames, steps=15, files=files))  # from step 8 on
    group = zarr.open(frames, mode="r")
    assert {*group.array_keys()} == {"u", "fields.v", "t", "frame", "step"}
    assert (group.attrs["frames"], group.attrs["steps"], group["u"].shape[0]) == (5, 15, 5)
    for number, (u, v, t) in enumerate(states(15)[2::3]):
        assert np.array_equal(group["u"][number], u)
        assert np.array_equal(group["fields.v"][number], v)
        assert group["t"][number] == t


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (program("frames"), "expected an absolute path"),
        (program("/tmp/frames", fields=["w"]), "expected names of fields"),
        (program("/tmp/frames", files="/tmp/frames"), "another path for each store"),
        (program("/tmp/frames", fields=["mine"]), "expected names of fields"),
        (program("/tmp/frames", compute={"w": lambda u: u}), "without computed fields"),
        (program("/tmp/frames", steps=None), "expected a number of steps"),
        (lambda ctx: ctx.steps(3, save=Save("/tmp/frames", 1)), "expected a state to save"),
        (lambda ctx: [*ctx.steps(3, ctx.state(t=1), save=Save("/tmp/f", 1))], "an array of the"),
    ],
)
def test_wrong_arguments(function, message):
    with pytest.raises(InputError, match=message):
        run_gang(grid(2), function)


@pytest.mark.filterwarnings("ignore:ctx.steps writes a state")
def test_a_full_disk_ends_the_run_by_name(tmp_path):
    """Files may not grow: as on a full disk, a write raises an error."""

    def run(ctx, limit=None):
        s = ctx.state(u=np.random.default_rng(0).normal(size=(200, 200)))
        save = Save(str(tmp_path / "frames"), 1)
        for step in ctx.steps(3, s, save=save, checkpoint=Checkpoint(str(tmp_path / "at"), 1)):
            if step == limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    grid = RankGrid.at_most(((200,), (200,)), 1)
    try:
        with pytest.raises(FileError, match=r"Make room, or give another path"):
            run_gang(grid, lambda ctx: run(ctx, limit=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert zarr.open(tmp_path / "frames", mode="r").attrs["frames"] == 1
    run_gang(grid, run)
    assert zarr.open(tmp_path / "frames", mode="r").attrs["frames"] == 3


def test_a_function_may_leave_its_loop(tmp_path):
    """The last frame is complete when the function has returned, and the thread has ended."""

    def leaving(ctx, x):
        s = ctx.state(x=x)
        for step in ctx.steps(100, s, save=[Save(str(tmp_path), 2)]):
            if step == 5:
                break
            s.x = s.x + 1
        return s.x

    before = {*threading.enumerate()}  # a test of a gang may have left one
    dask.compute(spmd(leaving, da.from_array(U), ranks=1), scheduler="sync")
    group = zarr.open(tmp_path, mode="r")
    assert (group.attrs["frames"], group.attrs["steps"]) == (2, 4)
    np.testing.assert_allclose(group["x"][:2], U + np.array([2, 4])[:, None, None])
    new = {*threading.enumerate()} - before
    assert not [thread for thread in new if thread.name.startswith("p2p-frames")]


def test_frames_are_complete_before_a_checkpoint(tmp_path, monkeypatch):
    """Also before one in memory: a run that resumes there must find them."""
    recorded, orders, record = [], [], Frames.record

    def noted(self, step):
        record(self, step)
        recorded.extend([step] if step else [])

    def note(step, *_):
        orders.append((step, [*recorded]))

    monkeypatch.setattr(Frames, "record", noted)
    monkeypatch.setattr(CheckpointFiles, "_complete", lambda self, step, record: note(step))
    in_memory = SimpleNamespace(save=note, read_state=lambda: (0, None))

    def run(ctx):
        s = ctx.state(u=U)
        files = Checkpoint(str(tmp_path / "states"), every=6)
        save = Save(str(tmp_path / "frames"), 2)
        for _ in ctx.steps(12, s, every=4, save=save, checkpoint=files):
            s.u = s.u + 1

    run_gang(grid(1), run, checkpoints=lambda *args: in_memory)
    assert orders == [(step, [*range(2, step + 1, 2)]) for step in (4, 6, 8, 12)]
