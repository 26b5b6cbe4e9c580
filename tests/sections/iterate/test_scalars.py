"""Fields of `iterate` that are numbers, records that functions read, and the end by time."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import dask
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Record, Save, iterate
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import box_slices
from dask_p2p.sections.gang import worker as progress
from dask_p2p.sections.gang.checkpoints import copy_into_state, size_of
from dask_p2p.sections.gpu.device import Gpu
from tests.sections.emulated import on_gpu, rank_tasks
from tests.sections.gangs import run_gang
from tests.sections.iterate.test_coupled import U, array
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RANKS = [1, 2, 3, 4]
START = abs(U) / 4 + 1


def difference(u):
    return u[1:-1, 1:-1] - u[:-2, 1:-1]


def advance(u, t, at):
    """Burgers' equation, with the largest time step that the newest values permit."""
    dt = 0.5 / at.last.get("speed", 2.0)
    inner = u[1:-1, 1:-1]
    return {"u": inner - dt * inner * difference(u), "t": t + dt}


def fill(u, t, at, out):
    new = advance(u, t, at)
    out.u[...] = new.pop("u")
    return new


RECORD = {"speed": Record(lambda u: abs(u).max(), op="max")}


def advanced(steps):
    """Return the field, the time, and the times after each step."""
    u, t, dt, times = START, 0.25, 0.5 / 2.0, []
    for _ in range(steps):
        padded = np.pad(u, 1, "wrap")
        u, t = u - dt * u * difference(padded), t + dt
        dt = 0.5 / abs(u).max()
        times.append(t)
    return u, t, times


@pytest.mark.parametrize("function", [advance, fill])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", mostly_slow(RANKS, [1, 4]))
def test_a_time_step_by_the_newest_record(client, ranks, overlap, function):
    fields = {"u": array(START), "t": 0.25}
    options = {"record": RECORD, "ranks": ranks, "overlap": overlap, "boundary": "periodic"}
    lazy_result = iterate(function, fields, 1, 30, **options)
    assert [*lazy_result] == ["u", "t", "speed", "steps"]
    assert lazy_result["t"].shape == ()
    assert lazy_result["t"].dtype == float
    (result,) = dask.compute(lazy_result)
    u, t, _ = advanced(30)
    assert np.array_equal(result["u"], u)
    assert result["t"] == t


def test_phases_read_and_change_numbers(client):
    def count(n, dt):
        return {"n": n + 1, "dt": dt / 2}

    def add(u, n, dt):
        return u + n * dt

    fields = {"n": 0, "u": array(np.zeros((24, 20))), "dt": Field(1, dtype="float32")}
    phases = [(count, ("n", "dt")), (add, ("u",)), (count, ("n", "dt"))]
    lazy_result = iterate(phases, fields, 0, 5)
    assert [*lazy_result] == ["n", "u", "dt"]
    (result,) = dask.compute(lazy_result)
    n, dt, total = 0, np.float32(1), 0.0
    for _ in range(5):
        n, dt = n + 1, dt / 2
        total += n * dt
        n, dt = n + 1, dt / 2
    assert (result["n"], result["dt"]) == (10, np.float32(2.0**-10))
    assert (result["n"].dtype.kind, result["dt"].dtype) == ("i", np.float32)
    assert np.allclose(result["u"], total, rtol=1e-12)


@pytest.mark.parametrize("ranks", [(1, 3), (4, 2)])
def test_stores_keep_numbers(client, tmp_path, ranks):
    import zarr

    fields = {"u": array(START), "t": 0.25}
    stores = {
        "save": Save(tmp_path / "frames.zarr", every=10),
        "checkpoint": Checkpoint(tmp_path / "states", every=10),
    }
    options = {"record": RECORD, "boundary": "periodic", **stores}
    dask.compute(iterate(advance, fields, 1, 20, ranks=ranks[0], **options))
    (result,) = dask.compute(iterate(advance, fields, 1, 30, ranks=ranks[1], **options))
    u, t, times = advanced(30)
    assert np.array_equal(result["u"], u)
    assert result["t"] == t
    frames = zarr.open_group(tmp_path / "frames.zarr", mode="r")
    assert frames["t"][...].tolist() == times[9::10]
    assert np.array_equal(frames["u"][1], advanced(20)[0])


def of_another_name(u, t, out):
    out.u[...] = u
    return {"time": t}


@pytest.mark.parametrize(
    ("step", "start", "message"),
    [
        (
            lambda u, t, at: {"u": u, "t": t + (at.rank if at.step == 5 else 1)},
            0.0,
            r"same number .* all ranks .* 't', got .* to",
        ),
        (lambda u, t: {"u": u, "t": t + 0.5}, 0, r"becomes int64 .* 't', got float64"),
        (lambda u, t: {"u": u, "t": u}, 0.0, r"number .* 't', got float64 of shape"),
        (of_another_name, 0.0, r"fields that are numbers, \['t'\], got \['time'"),
    ],
)
def test_wrong_numbers_are_named(client, step, start, message):
    lazy_result = iterate(step, {"u": array(START), "t": start}, 0, 9, ranks=2)
    with pytest.raises(BlockMismatchError, match=message):
        dask.compute(lazy_result)


def test_wrong_arguments_are_refused():
    def step(u, t):
        return {"u": u, "t": t}

    u, time = array(START), "max_time: expected a time like '3 hours', got "
    fields = {"u": u, "t": 0.0}
    for arguments, options, message in (
        ((step, fields), {"capture": True}, r"capture: .* the number 't'"),
        ((lambda t: {"t": t}, {"t": 0.0}), {}, r"at least one Dask array .* only numbers"),
        ((step, {"u": u, "t": Field(0.5, dtype=int)}), {}, "becomes int64 as the field 't'"),
        ((step, fields), {"max_time": 5}, f"{time}5"),
        ((step, fields), {"max_time": "soon"}, f"{time}'soon'"),
        ((lambda u: u, u), {"max_time": "1 s"}, "max_time: expected fields by name"),
    ):
        with pytest.raises(InputError, match=message):
            iterate(*arguments, 0, 3, **options)


# --- the end by time


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_end_by_time(client, tmp_path, ranks):
    def step(u, t):
        return {"u": u + 1, "t": t + 1}

    fields, total = {"u": array(np.zeros((24, 20))), "t": 0}, 10**9
    options = {"checkpoint": Checkpoint(tmp_path, every="1 hour"), "ranks": ranks}
    (result,) = dask.compute(iterate(step, fields, 0, total, max_time="300 ms", **options))
    steps = int(result["steps"])
    assert 0 < steps < total
    assert result["t"] == steps
    assert (result["u"] == steps).all()
    (later_result,) = dask.compute(iterate(step, fields, 0, steps + 10, **options))
    assert [*later_result] == ["u", "t"]
    assert (later_result["u"] == steps + 10).all()
    (newest,) = (path.name for path in tmp_path.glob("*.complete"))
    assert int(newest.removesuffix(".complete").rpartition("-")[2]) == steps


# --- checkpoints in memory


class States:
    """The states of ranks, which the next attempt resumes from."""

    def __init__(self):
        self.newest = {}  # step and state by rank

    def __call__(self, rank, connections, device):
        def save(step, arrays):
            state = memoryview(bytearray(size_of(arrays)))
            copy_into_state(state, arrays, device)
            self.newest[rank] = step, state

        return SimpleNamespace(save=save, read_state=lambda: self.newest.get(rank, (0, None)))


def test_numbers_and_series_on_a_gpu_resume_from_memory(gpu):
    states = States()

    def step(u, t, n, at, allowed):
        assert at.last.get("times", 0.5) == 0.5 + at.step // 2 * 2
        if at.step not in allowed:
            raise InputError(f"stopped at {at.step}")
        return {"u": u.apply(lambda values: values + 1), "t": t + 1, "n": n + 1}

    def attempt(allowed):
        u = on_gpu(gpu, array(START, ((12, 12), 20)))
        fields = {"u": u, "t": 0.5, "n": np.int32(3)}
        options = {"record": {"times": Record(lambda t: t, every=2)}, "checkpoint_every": 3}
        lazy_result = iterate(step, fields, 0, 9, ranks=2, allowed=allowed, **options)
        task = rank_tasks(lazy_result["u"])[0]

        def function(ctx):
            with ctx.device.running([]):
                block = gpu.written(START[box_slices(ctx.box)])
                (block,), *numbers = task.body(ctx, [block])
                return [gpu.read(block), *numbers]

        return run_gang(task.args[2], function, Gpu, states)

    with pytest.raises(InputError, match="stopped at 8"):  # all ranks have saved step 6
        attempt(range(8))
    (upper, (t,), (n,), (times,), (steps,)), (lower, *_) = attempt(range(6, 9))
    np.testing.assert_allclose(np.concatenate([upper, lower]), START + 9, rtol=1e-14)
    assert (t, n, n.dtype, steps) == (9.5, 12, np.int32, 9)
    assert times.tolist() == [2.5, 4.5, 6.5, 8.5]


# --- the log


def test_progress_is_logged_from_time_to_time(own_log, monkeypatch):
    times = iter([100.0, 109.0, 110.0, 111.0, 125.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(progress, "time", clock)
    own_log.set_level(logging.INFO, progress.__name__)
    rank_progress = progress.Progress(steps=1000, logs=True)
    for step in (1, 40, 51, 60, 351):
        rank_progress.advance(step)
    assert own_log.messages == [
        "51 of 1000 steps, now 5/s, 189.80 s left",
        "351 of 1000 steps, now 20/s, 32.45 s left",
    ]
    progress.Progress(steps=10).advance(3)  # of another rank: without a look at the clock
