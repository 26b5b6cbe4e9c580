"""Jobs that end by SIGKILL of every process, the scheduler included, also in the middle of writes.

The next job goes on with another number of ranks. Workers of it are killed and replaced. Programs
are `iterate`, and a loop of `ctx.steps`. `--kills` is the number of ended jobs for each.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import zarr

from tests.sections.iterate.job import EVERY_CHECKPOINT, EVERY_FRAME, PROGRAMS
from tests.sections.iterate.output.test_stores import states as states_after
from tests.support import import_path

STAGES = ((4, 24), (2, 48), (3, 72))  # ranks, and steps of the whole run until then


_LOOK_S = 0.002  # between looks at the files


class Jobs:
    """The process that forks those of jobs."""

    def __init__(self, log):
        command = [sys.executable, "-m", "tests.sections.iterate.job"]
        env = {**os.environ, "PYTHONPATH": import_path()}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "stderr": log}
        self.process = subprocess.Popen(command, env=env, **pipes)
        self.pids = []

    def ask(self, line):
        print(line, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, *job):
        self.pids = self.ask(json.dumps(job))

    def replace_workers(self, draw):
        """Kill some workers, or all, and start as many."""
        _, _, *workers = self.pids
        victims = draw.sample(workers, draw.randrange(1, len(workers) + 1))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.pids += self.ask(json.dumps(len(victims)))
        self.pids = [pid for pid in self.pids if pid not in victims]

    @property
    def runs(self):
        """Whether the client of the job has not ended."""
        with open(f"/proc/{self.pids[0]}/stat") as file:  # it is not waited for yet
            return file.read().rpartition(")")[2].split()[0] not in "ZX"

    def kill(self, draw):
        """Kill all processes, in any order; return the exit status of the client."""
        for pid in draw.sample(self.pids, len(self.pids)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status, *_ = self.ask("wait")
        self.pids = []
        return status

    def close(self):
        if self.pids:
            self.kill(random.Random(0))
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def jobs_of_a_process(path):
    with open(path, "w") as log:
        jobs = Jobs(log)
        try:
            yield jobs
        finally:
            jobs.close()


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


def assert_same(arrays, state):
    for name in "uv":
        assert np.array_equal(arrays[name], state[name]), name


def compared(folder, states):
    """Compare all that the stores call complete with the states after each step."""
    if (folder / "frames" / "zarr.json").exists():
        group = zarr.open(folder / "frames", mode="r")  # it always opens
        count = group.attrs.get("frames", 0)
        for frame in range(count):
            step = EVERY_FRAME * (frame + 1)
            assert_same({name: group[name][frame] for name in "uv"}, states[step])
            if "made" in group:
                assert group["made"][frame] == step
    for marker in names(folder / "states"):
        if marker.endswith(".complete"):
            name = marker.removesuffix(".complete")
            group = zarr.open(folder / "states" / name, mode="r")
            assert_same(group, states[int(name.removeprefix("step-"))])


def begun(jobs, folder, *stage):
    job = folder / f"job-{len(names(folder))}"
    job.mkdir(parents=True)
    jobs.start(str(job), *stage)
    return job / "result.npz"


def waited(jobs, folder, draw):
    """Wait for a moment of a job, or its end; return the name of the moment."""
    when = draw.choice([in_a_checkpoint, in_a_frame, at_any_moment])
    before = {
        "states": names(folder / "states"),
        "frames": len(names(folder / "frames" / "u" / "c")),
        "looks": draw.randrange(800),
        "others": draw.randrange(2),
    }
    while jobs.runs and not when(folder, before):
        time.sleep(_LOOK_S)
    return when.__name__


def killed(jobs, folder, program, stage, draw, states):
    """Begin a job and kill it; return the moment, or an empty text if the job was quicker."""
    result = begun(jobs, folder, program, *stage)
    when = waited(jobs, folder, draw)
    assert jobs.kill(draw) in (0, -signal.SIGKILL), "the job itself did not fail"
    compared(folder, states)
    return "" if result.exists() else when


def finished(jobs, folder, program, stage, draw, states):
    """Run a job to its end, while workers are replaced, and compare its results."""
    result = begun(jobs, folder, program, *stage)
    for _ in range(draw.randrange(3)):
        waited(jobs, folder, draw)
        jobs.replace_workers(draw)
    while jobs.runs:
        time.sleep(_LOOK_S)
    assert jobs.kill(random.Random(0)) == 0
    mass_of_run, (_, steps) = np.load(result), stage
    assert_same(mass_of_run, states[steps])
    mass = [state["u"].sum() for state in states[1 : steps + 1]]
    expected = mass if program == "iterate" else sum(mass)
    np.testing.assert_allclose(mass_of_run["mass"], expected, rtol=1e-13)
    group = zarr.open(folder / "frames", mode="r")
    assert group.attrs["frames"] == group["u"].shape[0] == steps // EVERY_FRAME
    compared(folder, states)
    assert {f"step-{steps:012}.complete"} <= names(folder / "states") or steps % EVERY_CHECKPOINT


@pytest.mark.programs(6)
@pytest.mark.timeout(0)  # as many kills as wanted
@pytest.mark.parametrize("program", PROGRAMS)
def test_jobs_that_are_killed_lose_nothing(tmp_path, pytestconfig, program):
    kill_count, draw = pytestconfig.getoption("--kills"), random.Random(0)
    states, kills, number = states_after(STAGES[-1][1]), [], 0
    terminal = pytestconfig.get_terminal_writer()
    with jobs_of_a_process(tmp_path / "log") as jobs:
        while len(kills) < kill_count:
            number += 1
            folder = tmp_path / f"run-{number}"
            for stage in STAGES:
                for _ in range(draw.randrange(1, 4)):
                    kills += filter(None, [killed(jobs, folder, program, stage, draw, states)])
                finished(jobs, folder, program, stage, draw, states)
            counts = {when: kills.count(when) for when in sorted({*kills})}
            terminal.line(f"{len(kills)} kills: {counts}")
    assert kills
