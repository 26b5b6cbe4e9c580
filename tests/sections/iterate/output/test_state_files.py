"""Frames and checkpoints in files of the state of a loop of steps."""

import re
import resource
import threading
import warnings
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

zarr = pytest.importorskip("zarr")

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
U = np.random.default_rng(0).random((12, 6))
CHUNKS = ((2,) * 6, (3, 3))


class StoppedError(Exception):
    pass


def program(path, steps, stop=None, steps_seen=None, **options):
    """Return a function of a rank that makes steps, and may stop in one of them."""

    def run(ctx):
        block = U[box_slices(ctx.box)]
        p = ctx.with_halo(block)
        s = ctx.state(u=block, fields={"v": block * 0}, p=p, t=0.5, n=np.int32(3))
        spec = Checkpoint(str(path), every=4, **options)
        for step in ctx.steps(steps, s, checkpoint=spec):
            if steps_seen is not None:
                steps_seen.append(step)
            if step == stop:
                raise StoppedError
            s.u = s.u * 1.5 + s.t
            s.fields["v"] += s.u
            s.p.inner[...] -= step
            s.t += 0.25
            s.n = s.n + np.int32(1)
        return s.u, s.fields["v"], s.p.inner.copy(), s.t, s.n

    return run


def grid(ranks):
    return RankGrid.at_most(CHUNKS, ranks)


def joined(ranks, results):
    """Return the whole arrays, and the numbers, of what all ranks return."""
    arrays = [np.empty(U.shape) for _ in range(3)]
    for rank, (*blocks, _, _) in enumerate(results):
        for array, block in zip(arrays, blocks, strict=True):
            array[box_slices(grid(ranks).box(rank))] = block
    (numbers,) = {(float(t), int(n), type(t), type(n)) for *_, t, n in results}
    return [*arrays, *numbers]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (3, 3)])
def test_another_number_of_ranks_resumes(tmp_path, before, after):
    with pytest.raises(StoppedError):
        run_gang(grid(before), program(tmp_path / "a", 20, stop=10))
    steps_seen = []
    resumed = run_gang(grid(after), program(tmp_path / "a", 20, steps_seen=steps_seen))
    result = joined(after, resumed)
    expected = joined(1, run_gang(grid(1), program(tmp_path / "b", 20)))
    assert min(steps_seen) == 8
    for value, expected_value in zip(result, expected, strict=True):
        assert np.array_equal(value, expected_value)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        f"step-{step:012}{end}" for step in (16, 20) for end in ("", ".complete")
    ]


def test_a_run_with_other_values_names_those_that_are_not_used(tmp_path):
    def values(steps, ranks=2, u=U, t=0.5, size=2):
        def run(ctx):
            block = u[box_slices(ctx.box)]
            s = ctx.state(u=block, fields={"v": block * 0}, t=t, own=np.zeros(size + ctx.rank))
            for _ in ctx.steps(steps, s, checkpoint=Checkpoint(str(tmp_path), every=2)):
                s.u = s.u + s.t
            return s.u

        with warnings.catch_warnings(record=True, action="always") as caught:
            run_gang(grid(ranks), run)
        return [str(warning.message) for warning in caught]

    assert not values(2)
    assert not values(4)
    (text,) = values(6, u=U + 1)
    assert re.match(r"checkpoint: the run resumes at step 4 of .* first run there in u: the", text)
    assert not values(8), "the first values are those of the first run"
    (text,) = values(10, u=U + 2, t=0.25)
    assert "first run there in u, t:" in text


def test_generators_and_lists_of_each_rank_go_on_with_as_many_ranks(tmp_path):
    def draw(stop=None, ranks=2):
        def run(ctx):
            rng = np.random.default_rng(ctx.rank)
            s = ctx.state(rng=rng, mine=np.zeros(ctx.rank + 2), seen=np.zeros(1))
            spec = Checkpoint(str(tmp_path), every=3)
            for step in ctx.steps(10, s, checkpoint=spec):
                if step == stop:
                    raise StoppedError
                s.seen += s.rng.normal()
                s.mine = np.append(s.mine, s.seen)
            return s.mine

        return run_gang(grid(ranks), run)

    with pytest.raises(StoppedError):
        draw(stop=7)
    resumed = draw()
    for rank, block in enumerate(resumed):
        steps = np.cumsum(np.random.default_rng(rank).normal(size=10))
        np.testing.assert_allclose(block, [*np.zeros(rank + 2), *steps])
    with pytest.raises(InputError, match=r"expected 2 ranks, .* got 3\. Give ranks=2"):
        draw(ranks=3)


def test_wrong_arguments(tmp_path):
    def other(ctx):
        s = ctx.state(w=U[box_slices(ctx.box)])
        for _ in ctx.steps(9, s, checkpoint=Checkpoint(str(tmp_path / "a"))):
            s.w += 1

    folder = str(tmp_path)
    run_gang(grid(2), program(tmp_path / "a", 8))
    for message, function in (
        ("an absolute path", program("states", 5)),
        ("Checkpoint, and a state", lambda ctx: ctx.steps(3, checkpoint=Checkpoint(folder))),
        ("Checkpoint, and a state", lambda ctx: ctx.steps(3, ctx.state(t=0), checkpoint=folder)),
        ("at least 8 steps", program(tmp_path / "a", 6)),
        ("because of resume=False", program(tmp_path / "a", 9, resume=False)),
        ("checkpoint of the same fields", other),
    ):
        with pytest.raises(InputError, match=message):
            run_gang(grid(2), function)


def test_a_folder_that_ranks_do_not_share_is_refused_at_the_start(tmp_path):
    """Each rank has a folder of its own, as on the disks of two hosts."""

    def run(ctx):
        folder = tmp_path / str(ctx.rank)
        s, files = ctx.state(n=0), Checkpoint(str(folder), every=100)
        for _ in ctx.steps(4, s, checkpoint=files):
            (folder / "stepped").touch()

    with pytest.raises(FileError, match=r"a folder that all workers see, .* which some do not"):
        run_gang(grid(2), run)
    assert not [*tmp_path.glob("*/*")]


def test_only_what_this_package_has_written_is_removed(tmp_path):
    users = ["run-1", "run-0123456789abcdef", "step-1", "step-final2", f"step-{3:012}"]
    for name in users:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    zarr.create_group(tmp_path / f"step-{5:012}")
    with pytest.raises(StoppedError):
        run_gang(grid(2), program(tmp_path, 20, stop=10))
    (tmp_path / f"step-{8:012}.complete").unlink()  # it was never written
    (tmp_path / "dask_p2p-run-0123456789abcdef").touch()
    (tmp_path / f"step-{6:012}.incomplete").touch()
    (tmp_path / f"step-{6:012}").mkdir()
    for steps in (7, 9):
        run_gang(grid(2), program(tmp_path, steps, keep=1))
        names = {path.name for path in tmp_path.iterdir()}
        last = f"step-{steps // 4 * 4:012}"
        files = {last, f"{last}.complete"}
        assert files == names - {*users, f"step-{5:012}", f"step-{6:012}.incomplete"}
        assert all((tmp_path / name / "notes.txt").exists() for name in users)
    (tmp_path / f"step-{12:012}").mkdir()
    with pytest.raises(FileError, match=r"no folder at .*step-000000000012, got one that dask_p2p"):
        run_gang(grid(2), program(tmp_path, 13))


def test_numbers_that_differ_between_ranks_are_refused(tmp_path):
    def count(ctx):
        s = ctx.state(n=0)
        for _ in ctx.steps(4, s, checkpoint=Checkpoint(str(tmp_path), every=2)):
            s.n += ctx.rank

    with pytest.raises(InputError, match="got n, which differs"):
        run_gang(grid(2), count)
    assert not [*tmp_path.glob("*.complete")]


def program_with_frames(path, steps=12, stop=None, files=None, **options):
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
        run_gang(grid(ranks), program_with_frames(frames, stop=10, files=files))
    assert zarr.open(frames, mode="r").attrs["frames"] == 2  # no rank has recorded the third
    run_gang(grid(ranks), program_with_frames(frames, steps=15, files=files))  # from step 8 on
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
        (program_with_frames("frames"), "expected an absolute path"),
        (program_with_frames("/tmp/frames", fields=["w"]), "expected names of fields"),
        (program_with_frames("/tmp/frames", files="/tmp/frames"), "another path for each store"),
        (program_with_frames("/tmp/frames", fields=["mine"]), "expected names of fields"),
        (program_with_frames("/tmp/frames", compute={"w": lambda u: u}), "without computed fields"),
        (program_with_frames("/tmp/frames", steps=None), "expected a number of steps"),
        (lambda ctx: ctx.steps(3, save=Save("/tmp/frames", 1)), "expected a state to save"),
        (lambda ctx: [*ctx.steps(3, ctx.state(t=1), save=Save("/tmp/f", 1))], "an array of the"),
    ],
)
def test_wrong_arguments_of_frames(function, message):
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
