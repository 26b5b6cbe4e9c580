"""Jobs that are killed at any moment, also in the middle of writes: the next job loses nothing.

A job is a process with a scheduler, workers and a client. The next one goes on with another number
of ranks. Programs are `iterate`, and a loop of `ctx.steps`. `--kills` is the number of killed jobs
of each.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from contextlib import suppress

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

from dask_p2p import Checkpoint, LocalBlock, Same, Save, iterate, spmd
from tests.sections.iterate.output.test_stores import MASS, fields, react, states
from tests.support import BOUND_S, prepare_to_fork

STAGES = ((4, 24), (2, 48), (3, 72))  # ranks, and steps of the whole run until then
#: By number of ranks: chunks of the fields.
CHUNKS = {4: ((8, 8, 8), (10, 10)), 2: ((12, 12), (20,)), 3: ((6, 6, 6, 6), (5, 5, 5, 5))}
EVERY_FRAME, EVERY_CHECKPOINT = 3, 4
STATES = states(STAGES[-1][1])
_LOOK_S = 0.002  # between looks at the files


# --- jobs


def by_iterate(ranks, steps, options):
    """Return the fields after a number of steps, and the mass after each."""
    return iterate(react, fields(CHUNKS[ranks]), 1, steps, record=MASS, ranks=ranks, **options)


def by_steps(ranks, steps, options):
    """Return the fields by a loop of `spmd`, and the sum of the masses after all steps."""
    arrays = fields(CHUNKS[ranks])
    outputs = {"u": LocalBlock(), "v": LocalBlock(), "mass": Same(0.0)}
    keywords = {"outputs": outputs, "ranks": ranks, "steps": steps, "options": options}
    return spmd(loop, arrays["u"], arrays["v"], **keywords)


def loop(ctx, u, v, steps, options):
    """Make the steps of one rank."""
    s = ctx.state(u=u, v=v, mass=0.0, count=0)
    for step in ctx.steps(steps, s, every=5, **options):
        assert s.count == step
        new = react(**ctx.pad({"u": s.u, "v": s.v}, 1, "periodic"))
        s.u, s.v = new["u"], new["v"]
        s.mass += float(ctx.allreduce(s.u.sum()))
        s.count += 1
    return {"u": s.u, "v": s.v, "mass": s.mass}


PROGRAMS = {"iterate": by_iterate, "steps": by_steps}


def run_job(folder, program, ranks, steps):
    """Compute the fields after a number of steps; write them when all is done."""
    stores = {
        "save": Save(folder / "frames", EVERY_FRAME),
        "checkpoint": Checkpoint(folder / "states", every=EVERY_CHECKPOINT),
    }
    options = {"threads_per_worker": 2, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=ranks, **options) as cluster, Client(cluster):
        (result,) = dask.compute(PROGRAMS[program](ranks, steps, stores))
    np.savez(folder / f"result-{steps}.npz", **result)


def started(*job):
    """Begin a job; return its process."""
    process = multiprocessing.get_context("forkserver").Process(target=run_job, args=job)
    process.start()
    return process


# --- moments


def names(folder):
    with suppress(FileNotFoundError):
        return {path.name for path in folder.iterdir()}
    return set()


def in_a_checkpoint(folder, before):
    """Whether a checkpoint is being written, after some others of this job."""
    names_in_folder = names(folder / "states")
    new = [name for name in names_in_folder - before["states"] if name[-1].isdigit()]
    last = max(new, default="")
    return len(new) > before["others"] and f"{last}.complete" not in names_in_folder


def in_a_frame(folder, before):
    """Whether a frame is being written, after some others of this job: it has chunks."""
    return len(names(folder / "frames" / "u" / "c")) > before["frames"] + before["others"]


def at_any_moment(folder, before):
    """Whether it is the moment: after some looks."""
    before["looks"] -= 1
    return before["looks"] < 0


def kill(process, folder, draw):
    """Kill a job at a moment; return the name of the moment, or none if the job was quicker."""
    is_there = draw.choice([in_a_checkpoint, in_a_frame, at_any_moment])
    before = {
        "states": names(folder / "states"),
        "frames": len(names(folder / "frames" / "u" / "c")),
        "looks": draw.randrange(800),
        "others": draw.randrange(2),
    }
    while process.is_alive() and not is_there(folder, before):
        time.sleep(_LOOK_S)
    process.kill()
    process.join(BOUND_S)
    assert process.exitcode in (0, -signal.SIGKILL), "the job itself did not fail"
    return [is_there.__name__] if process.exitcode else []


# --- what is left


def assert_same(arrays, state):
    for name in "uv":
        assert np.array_equal(arrays[name], state[name]), name


def check_stores(folder):
    """Compare all that the stores call complete with the states after each step."""
    if (folder / "frames" / "zarr.json").exists():
        group = zarr.open(folder / "frames", mode="r")  # it always opens
        for frame in range(group.attrs.get("frames", 0)):
            step = EVERY_FRAME * (frame + 1)
            assert_same({name: group[name][frame] for name in "uv"}, STATES[step])
            if "count" in group:
                assert group["count"][frame] == step
    for marker in names(folder / "states"):
        if marker.endswith(".complete"):
            name = marker.removesuffix(".complete")
            group = zarr.open(folder / "states" / name, mode="r")
            assert_same(group, STATES[int(name.removeprefix("step-"))])


def check_end(folder, program, steps):
    """Compare the results of a job that has ended."""
    result = np.load(folder / f"result-{steps}.npz")
    assert_same(result, STATES[steps])
    mass = [state["u"].sum() for state in STATES[1 : steps + 1]]
    expected = mass if program == "iterate" else sum(mass)
    np.testing.assert_allclose(result["mass"], expected, rtol=1e-13)
    group = zarr.open(folder / "frames", mode="r")
    assert group.attrs["frames"] == group["u"].shape[0] == steps // EVERY_FRAME
    assert {f"step-{steps:012}.complete"} <= names(folder / "states") or steps % EVERY_CHECKPOINT


@pytest.mark.programs
@pytest.mark.timeout(0)  # as many kills as wanted
@pytest.mark.parametrize("program", PROGRAMS)
def test_jobs_that_are_killed_lose_nothing(tmp_path, pytestconfig, program):
    prepare_to_fork()
    kill_count, draw = pytestconfig.getoption("--kills"), random.Random(0)
    kills, number = [], 0
    terminal = pytestconfig.get_terminal_writer()
    while len(kills) < kill_count:
        number += 1
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        for ranks, steps in STAGES:
            for _ in range(draw.randrange(1, 4)):
                kills += kill(started(folder, program, ranks, steps), folder, draw)
                check_stores(folder)
            process = started(folder, program, ranks, steps)
            process.join(BOUND_S)
            assert process.exitcode == 0
            check_end(folder, program, steps)
            check_stores(folder)
        counts = {moment: kills.count(moment) for moment in sorted({*kills})}
        terminal.line(f"{len(kills)} kills: {counts}")
    assert kills
