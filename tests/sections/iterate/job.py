"""Runs jobs whose processes a test kills: a scheduler, workers and a client, all forked from here.

Each line of the standard input is a job as JSON, then numbers of further workers, and "wait".
Replies are lines of JSON, too. Forks of one process that has imported everything begin within
milliseconds.
"""

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import dask
import numpy as np
import zarr  # noqa: F401
from distributed import Client, Scheduler, Worker

import tests.forked  # noqa: F401
from dask_p2p import Checkpoint, LocalBlock, Same, Save, iterate, spmd
from tests.sections.iterate.output.test_stores import MASS, fields
from tests.sections.iterate.test_coupled import react

#: By number of ranks: chunks of the fields.
CHUNKS = {4: ((8, 8, 8), (10, 10)), 2: ((12, 12), (20,)), 3: ((6, 6, 6, 6), (5, 5, 5, 5))}
EVERY_FRAME, EVERY_CHECKPOINT = 3, 4


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
    s = ctx.state(u=u, v=v, mass=0.0, made=0)
    for step in ctx.steps(steps, s, every=5, **options):
        assert s.made == step
        new = react(**ctx.pad({"u": s.u, "v": s.v}, 1, "periodic"))
        s.u, s.v = new["u"], new["v"]
        s.mass += float(ctx.allreduce(s.u.sum()))
        s.made += 1
    return {"u": s.u, "v": s.v, "mass": s.mass}


PROGRAMS = {"iterate": by_iterate, "steps": by_steps}


async def scheduler(folder):
    options = {"scheduler_file": str(folder / "scheduler.json"), "dashboard": False, "port": 0}
    async with Scheduler(**options) as scheduler_process:
        await scheduler_process.finished()


async def worker(folder):
    """Run a worker, as soon as the scheduler has an address."""
    while not (folder / "scheduler.json").exists():
        await asyncio.sleep(0.01)
    options = {"nthreads": 2, "local_directory": str(folder), "dashboard": False}
    async with Worker(scheduler_file=str(folder / "scheduler.json"), **options) as dask_worker:
        await dask_worker.finished()


def client(folder, program, ranks, steps):
    """Compute the fields after a number of steps, by one of the programs."""
    while not (folder / "scheduler.json").exists():
        time.sleep(0.01)
    stores = {
        "save": Save(folder.parent / "frames", EVERY_FRAME),
        "checkpoint": Checkpoint(folder.parent / "states", every=EVERY_CHECKPOINT),
    }
    with Client(scheduler_file=str(folder / "scheduler.json")) as dask_client:
        dask_client.wait_for_workers(ranks)
        (result,) = dask.compute(PROGRAMS[program](ranks, steps, stores))
        np.savez(folder / "result.part.npz", **result)
        os.replace(folder / "result.part.npz", folder / "result.npz")


def forked(work, *args):
    """Return the process that does some work."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(2, 1)
        result = work(*args)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main():
    pids, where = [], Path()
    for line in sys.stdin:
        if line.strip() == "wait":
            reply = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        elif isinstance(job := json.loads(line), int):
            reply = [forked(worker, where) for _ in range(job)]
            pids += reply
        else:
            folder, program, ranks, steps = job
            where = Path(folder)
            pids = [forked(client, where, program, ranks, steps), forked(scheduler, where)]
            pids += [forked(worker, where) for _ in range(ranks)]
            reply = pids
        sys.stdout.write(f"{json.dumps(reply)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
