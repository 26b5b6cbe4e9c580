"""Fields of `iterate` that are numbers, records that functions read, and the end by time."""

import logging
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Record, Save, iterate, spmd
from dask_p2p.errors import BlockMismatchError, InputError, P2PWarning
from dask_p2p.geometry import box_slices
from dask_p2p.sections.gang import worker as progress
from dask_p2p.sections.gang.checkpoints import copy_into_state, size_of
from dask_p2p.sections.gpu.device import Gpu
from tests.sections.emulated import on_gpu, rank_tasks
from tests.sections.gangs import run_gang
from tests.sections.iterate.test_coupled import U, array, padded
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
        u, t = u - dt * u * difference(np.pad(u, 1, "wrap")), t + dt
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
    assert (lazy_result["t"].shape, lazy_result["t"].dtype) == ((), float)
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


def wall(rim, inside, at):
    """Let the field be 3 on the face of the wall."""
    rim[...] = 2 * 3 - inside


def profile(rim, inside, at):
    """Inflow that depends on the position and the step."""
    rim[...] = np.sin(at.index[0] + 0.5 * at.index[1] + at.step) - inside


def spread(u):
    """A stencil of all points within its depth, corners too."""
    return {"u": u[1:-1, 1:-1] * 0.3 + (u[:-2, :-2] + u[2:, 2:] - u[:-2, 2:]) * 0.2}


BOUNDARIES = {
    "odd": ["odd", "odd"],
    "one wall": [(wall, "nearest"), "periodic"],
    "walls": [wall, (wall, "odd")],
    "mixed": [("odd", 0.5), (profile, "reflect")],
    "number": [(wall, profile), (0.25, "nearest")],
    "inflow": [(profile, wall), (profile, "odd")],
}


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_boundaries(client, ranks, overlap, boundary):
    options = {"boundary": dict(enumerate(boundary)), "ranks": ranks, "overlap": overlap}
    result = iterate(spread, {"u": array(U)}, 1, 7, **options)["u"].compute()
    u = U
    for step in range(7):
        u = spread(padded(u, 1, boundary, step))["u"]
    assert np.array_equal(result, u)


@pytest.mark.parametrize("chunks", [(12, 10), (24, 5), (6, 20), (3, 20), (24, 2)])
def test_halos_wider_than_local_blocks(client, chunks):
    boundary = [(wall, "odd"), ("odd", profile)]

    def function(ctx, u):
        p = ctx.with_halo(u, depth=7, boundary=dict(enumerate(boundary)))
        block = ctx.update_halo(p)
        expected = padded(U, 7, boundary)
        part = tuple(slice(start, stop + 14) for start, stop in ctx.box)
        ctx.pad(u, 7, 0.0)
        padded_anew = ctx.pad(u, 7, dict(enumerate(boundary)))
        is_equal = np.array_equal(block, expected[part]) and np.array_equal(padded_anew, block)
        return np.full_like(u, is_equal)

    assert spmd(function, da.from_array(U, chunks=chunks), ranks=4).compute().all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_records_read_the_halo_of_the_next_step(client, ranks):
    boundary = [profile, "odd"]
    rim = Record(lambda u, at: u[0].sum() if at.box[0][0] == 0 else 0.0)
    options = {"boundary": dict(enumerate(boundary)), "record": {"rim": rim}, "ranks": ranks}
    (result,) = dask.compute(iterate(spread, {"u": array(U, chunks=(8, 20))}, 1, 5, **options))
    u, expected = U, []
    for step in range(5):
        u = spread(padded(u, 1, boundary, step))["u"]
        expected.append(padded(u, 1, boundary, step + 1)[0].sum())
    assert np.array_equal(result["u"], u)
    np.testing.assert_allclose(result["rim"], expected, rtol=1e-12)


def test_wrong_boundaries_are_refused(client):
    def returns(rim, inside, at):
        return -inside

    lazy_result = iterate(spread, {"u": array(U)}, 1, 3, boundary=returns, ranks=2)
    with pytest.raises(InputError, match=r"fills its first argument.*returns a value"):
        dask.compute(lazy_result)
    integers = array(np.zeros((24, 20), "uint8"))
    with pytest.raises(InputError, match="'odd' for uint8, which has no negative"):
        iterate(spread, {"u": integers}, 1, 3, boundary="odd")
    with pytest.raises(InputError, match=r"'odd', a function of \(rim, inside, at\), or a number"):
        iterate(spread, {"u": array(U)}, 1, 3, boundary="mirror")
    captured = iterate(spread, {"u": array(U)}, 1, 9, boundary=profile, capture=True)
    with pytest.raises(InputError, match=r"at\.step: .* capture=True"):
        dask.compute(captured)


def of_its_mean(rim, inside, at):
    rim[...] = 2 * inside.mean() - inside


def along_the_wall(rim, inside, at):
    rim[...] = np.cumsum(inside, axis=1)


def stepped(boundary, ranks):
    """Return the result of a stencil on columns; the first halos have ones alone."""
    one = array(np.ones_like(U), (24, 5))

    def spread(u, c, at):
        return {"u": (u[:-2] + u[2:])[:, 1:-1] / 2 + c * (at.step > 0)}

    options = {"boundary": (boundary, "periodic"), "constants": {"c": array(U, (24, 5))}}
    return dask.compute(iterate(spread, {"u": one}, 1, 4, ranks=ranks, **options)["u"])[0]


@pytest.mark.parametrize("function", [of_its_mean, along_the_wall])
def test_functions_that_depend_on_the_number_of_ranks_are_named(client, function):
    match = f"boundary: {function.__name__} returns other values .* number of ranks"
    with pytest.warns(P2PWarning, match=match):
        result = stepped(function, 4)
    assert not np.allclose(result, stepped(function, 1))


@pytest.mark.parametrize("function", [wall, profile])
def test_other_functions_are_compared_without_a_word(client, recwarn, function):
    assert np.array_equal(stepped(function, 4), stepped(function, 1))
    assert not [warning for warning in recwarn if issubclass(warning.category, P2PWarning)]
