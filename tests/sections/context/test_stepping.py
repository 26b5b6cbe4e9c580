"""Loops of steps: which state a rank goes on with."""

from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p import Checkpoint, Save
from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from tests.sections.gangs import run_gang

STEPS = 12


def in_place_by_another_name(ctx, x):
    s = ctx.state(x=x)
    u = s.x
    for _ in ctx.steps(STEPS, s, every=1):
        u += 1
    return u


def constants(ctx, x):
    s = ctx.state(x=x, zeros=np.zeros(3), of={"n": 3}, empty=np.zeros((0, 3)))
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
    return s.x


def other_shapes(ctx, x):
    """Particles that come and go."""
    s = ctx.state(x=x, some=np.zeros((1, 2), "f4"))
    for step in ctx.steps(STEPS, s, every=1):
        assert s.some.tolist() == [[step, step]] * (1 + step % 3)
        assert s.some.dtype == "f4"
        s.x = s.x + 1
        s.some = np.full((1 + (step + 1) % 3, 2), step + 1, "f4")
    return s.x


def moving_particles(ctx, x):
    """One rank begins without particles, and the other one is soon without any."""
    s = ctx.state(x=x, p=np.zeros(1 - ctx.rank), none=np.zeros(0))
    for _ in ctx.steps(STEPS, s, every=1):
        s.x = s.x + 1
        s.p = np.zeros(ctx.rank)
    return s.x


def dicts(ctx, x):
    s = ctx.state(fields={"u": x, 2: (x - 1, 0.0)})
    for _ in ctx.steps(STEPS, s, every=1):
        first, second = s.fields[2]
        s.fields["u"] = first + 2
        s.fields = {**s.fields, 2: (s.fields["u"] - 1, second + 1)}
    assert s.fields[2][1] == STEPS
    return s.fields["u"]


def values_after(step):
    """Return values of all kinds, each time in other places."""
    values = [
        *(np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T[::-1], np.array(3.5)),
        *(np.zeros(3, [("a", "i4"), ("b", ">f8", 2)]), np.array(["2020-01-01"], "M8[D]")),
        *(np.arange(3, dtype=">i2"), "abc" == "abd", 2**62, 0.5, 1j, np.complex64(3 + 1j)),
    ]
    return values[step % len(values) :] + values[: step % len(values)]


def all_kinds(ctx, x):
    s = ctx.state(x=x, values=values_after(0))
    for step in ctx.steps(STEPS, s, every=1):
        for value, expected in zip(s.values, values_after(step), strict=True):
            assert type(value) is type(expected)
            assert np.array_equal(value, expected)
            assert np.asarray(value).dtype == np.asarray(expected).dtype
        s.x, s.values = s.x + 1, values_after(step + 1)
    return s.x


KINDS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def random_numbers(ctx, x):
    """Three numbers leave half of a word."""
    generators = [np.random.Generator(kind(3)) for kind in KINDS]
    draws = [[g.integers(9, size=3, dtype=np.int32) for _ in range(STEPS)] for g in generators]
    s = ctx.state(x=x, generators=[np.random.Generator(kind(3)) for kind in KINDS])
    for step in ctx.steps(STEPS, s, every=1):
        for generator, numbers in zip(s.generators, draws, strict=True):
            assert np.array_equal(generator.integers(9, size=3, dtype=np.int32), numbers[step])
        s.x = s.x + 1
    return s.x


def halo_arrays(ctx, x):
    p, q = ctx.with_halo(x), ctx.with_halo(x)
    s = ctx.state(p=p)
    for _ in ctx.steps(STEPS, s, every=1):
        q.inner[:] = s.p.inner + 1
        p.inner[:] = q.inner
    return p.inner.copy()


def without_end(ctx, x):
    s = ctx.state(x=x)
    for step in ctx.steps(None, s, every=1):
        s.x = s.x + 1
        if step == STEPS - 1:
            break
    return s.x


def of_a_function(ctx, x):
    def step(s):
        s.x = s.x + 1
        s.t += 0.5

    s = ctx.loop(step, STEPS, every=1, x=x, t=0.0)
    assert s.t == STEPS / 2
    return s.x


def scratch_memory(ctx, x):
    """Arrays that a step fills before it reads them, constants, and parts of the state."""
    s = ctx.state(x=x, fields={"n": 0}, y=x)
    halo_array, scale, scratch, arrays = ctx.with_halo(x), np.ones(3), np.empty(3), [np.empty(3)]
    fields, old, part = s.fields, s.x, s.y[:1]
    tensor = SimpleNamespace(dtype="f8", size=list)  # of PyTorch, where `size` is a method
    for step in ctx.steps(STEPS, s, every=1):
        assert fields["n"] == step
        fields["n"] += 1
        part += 1
        halo_array.inner[:] = np.multiply(s.x, scale, out=scratch)
        s.x = np.add(scratch, scale, out=arrays[0]).copy()
    return s.x + 0 * old * len(tensor.dtype)


RIGHT = [
    *(in_place_by_another_name, constants, other_shapes, moving_particles, scratch_memory),
    *(dicts, all_kinds, random_numbers, halo_arrays, without_end, of_a_function),
]


def argument_worked_on(ctx, x):
    s = ctx.state(x=x)
    for _ in ctx.steps(STEPS, s, every=1):
        x = x + 1
    return x


def number_of_the_loop(ctx, x):
    s, total = ctx.state(x=x), 0.0
    for _ in ctx.steps(STEPS, s, every=1):
        total += 1
        s.x = x + total
    return s.x


def series_read_later(ctx, x):
    s, series = ctx.state(x=x), np.zeros(STEPS)
    for step in ctx.steps(STEPS, s, every=1):
        series[step] = 1
        s.x = s.x + 1
    return s.x * series.all()


def series_of_a_closure(ctx, x):
    series, t = np.zeros(STEPS), 0

    def step(s):
        nonlocal t
        t += 1
        series[s.n] = 1
        s.x, s.n = s.x + 1, s.n + 1

    return ctx.loop(step, STEPS, every=1, x=x, n=0).x * series.all() + t - STEPS


AT_THE_START = [constants, argument_worked_on, number_of_the_loop]
AT_THE_START += [series_read_later, series_of_a_closure]


def attempts(size):
    """Return a function that runs an attempt of ranks from a step; they keep their states."""
    ranks, saved = RankGrid(((3,) * size,), (size,)), [SavedStates() for _ in range(size)]

    def attempt(resume, function, wrap=lambda checkpoints: checkpoints):
        def checkpoints(rank, connections, device):
            states = States(saved[rank], "x", resume, range(size), lambda: None)
            return wrap(Checkpoints(rank, [*"ab"[:size]], connections, states, device))

        return run_gang(ranks, function, checkpoints=checkpoints)

    return attempt, saved


class StoppedError(Exception):
    pass


def first_step_again(function):
    """Check the values of a function that begins again; return its first step, or None."""
    attempt, saved = attempts(2)
    first_steps = []

    def call(ctx):
        values = function(ctx, np.arange(3.0))
        first_steps.append(ctx.progress.first)
        assert values.tolist() == [12, 13, 14]

    def stop_at_step_7(checkpoints):
        save = checkpoints.save

        def save_and_stop(step, arrays):
            save(step, arrays)
            if step == 7:
                checkpoints._connections.gather("both have their states", b"")
                raise StoppedError

        checkpoints.save = save_and_stop
        return checkpoints

    attempt(None, call)
    if not saved[0].gangs:
        return None
    for states in saved:
        states.drop("x")
    with pytest.raises(StoppedError):
        attempt(None, call, stop_at_step_7)
    attempt(7, call)
    return first_steps[-1]


@pytest.mark.parametrize("function", [*RIGHT, *AT_THE_START[1:]])
def test_ranks_that_begin_again_make_the_same(function):
    """An unchanged state is no reason to leave out steps, whichever state was kept."""
    assert first_step_again(function) in (None, 0 if function in AT_THE_START else 7)


class Clock:
    t = 0

    def tick(self):
        self.t += 1
        return self.t


def tick_array(array):
    array[0] += 1
    return array[0]


DRAWS = [*np.random.default_rng(1).random(STEPS)]
COUNTERS = {  # what makes one, and a function that counts with it from 1
    "array": (lambda: np.zeros(1), tick_array),
    "list": (list, lambda values: values.append(0) or len(values)),
    "dict": (dict, lambda values: values.update(t=values.get("t", 0) + 1) or values["t"]),
    "nested": (lambda: ([{"clock": Clock()}],), lambda values: values[0][0]["clock"].tick()),
    "object": (Clock, Clock.tick),
    "generator": (lambda: np.random.default_rng(1), lambda rng: 1 + DRAWS.index(rng.random())),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_contents_that_a_loop_carries_are_not_resumed(kind, own_log):
    make, count = COUNTERS[kind]

    def function(ctx, x):
        counter, s = make(), ctx.state(x=x, large=np.zeros(99))
        for step in ctx.steps(STEPS, s, every=1):
            assert count(counter) == step + 1
            s.x, s.large = s.x + 1, s.large + 1
        return s.x

    assert first_step_again(function) is None
    assert "carries counter from step to step" in own_log.text


@pytest.mark.parametrize("option", ["save", "checkpoint"])
def test_files_of_a_state_that_does_not_change_are_named(alone, tmp_path, option):
    store = {"save": Save, "checkpoint": Checkpoint}[option](tmp_path / "store", every=4)
    steps = alone.steps(STEPS, alone.state(u=np.zeros(3), n=0), **{option: store})
    with pytest.warns(P2PWarning, match="had not changed after 4 steps: u, n. Change the state"):
        assert len([*steps]) == STEPS


def test_a_step_returns_nothing(alone):
    with pytest.raises(InputError, match=r"returns ndarray\. Write s\.u = "):
        alone.loop(lambda s: s.u + 1, 3, u=np.zeros(3))


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ("text", "str as u"),
        (None, "NoneType as u"),
        ([np.zeros(2), {"a": b"bytes"}], r"bytes as u\[1\]\['a'\]"),
        (np.array([None]), "ndarray as u"),
        (2**70, f"{2**70} as u"),
        (np.random.RandomState(3), "RandomState as u"),
    ],
)
def test_other_values_are_refused(alone, value, received):
    with pytest.raises(InputError, match=f"numbers of 64 bits, .* got {received}"):
        alone.state(u=value)
    s = alone.state(u=0)
    steps = alone.steps(3, s)
    next(steps)
    s.u = value
    with pytest.raises(InputError, match="state: expected"):
        next(steps)


def test_values_keep_their_names(alone):
    s = alone.state(u=np.zeros(3))
    steps = alone.steps(3, s)
    next(steps)
    s.v = 3
    with pytest.raises(InputError, match=r"values that ctx\.state got, \['u'\], got \['u', 'v'\]"):
        next(steps)


# --- variables that a loop carries from step to step, next to its state


def time(ctx, s):
    t = 0.0
    for _ in ctx.steps(3, s):
        s.u = s.u + t
        t += 0.5


def previous(ctx, s):
    before, scale = s.u.copy(), np.float64(1)
    for _ in ctx.steps(3, s):
        s.u, before = 2 * scale * s.u - before, s.u
        scale = scale / 2


def closing(ctx, s):
    t = 0

    def scaled():
        return s.u * t

    for _ in ctx.steps(3, s):
        t += 1
        s.u = scaled()


def residual(ctx, s):
    error, small = np.inf, 1e-3
    for step in ctx.steps(3, s):
        new = s.u / 2
        error = abs(new - s.u).max()
        s.u = new
        if error < small or step > 100:
            break
    return error


def views_of_the_state(ctx, s):
    u = s.u
    w = s.u[1:]
    for _ in ctx.steps(3, s):
        u += 1
        w *= 2


def swapped(ctx, s):
    u, v = s.u, s.v
    for _ in ctx.steps(3, s):
        v += u
        u, v = v, u


def inner_loop(ctx, s):
    for _ in ctx.steps(3, s):
        total = 0.0
        for number in range(3):
            total += number
        s.u = s.u + total + sum([number for number in range(2)])  # noqa: C416


@pytest.mark.parametrize(
    ("function", "names"),
    [
        *((time, ["t"]), (previous, ["scale", "before"]), (closing, ["scaled", "t"])),
        *((residual, []), (swapped, ["u", "v"]), (views_of_the_state, []), (inner_loop, [])),
    ],
)
def test_values_that_a_loop_carries_are_named(alone, function, names, own_log):
    alone.checkpoints = SimpleNamespace(read_state=lambda: (0, None), save=lambda *_: None)
    function(alone, alone.state(u=np.ones(3), v=np.ones(3), t=0.0))
    assert len(own_log.messages) == bool(names)
    carried = own_log.text.partition("carries ")[2].partition(" from step")[0]
    assert sorted(carried.split(", ")) == sorted(names or [""])
