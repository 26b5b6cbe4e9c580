from __future__ import annotations

import pickle

import dask.array as da
import numpy as np

import dask_p2p
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.running.gang import packed, unpacked
from tests.fusing.support import read_arrays, smooth


def programs(x, steps):
    for _ in range(steps):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
    tasks = read_arrays(x)[1].tasks
    return len(tasks.nodes), programs_of(tasks, 4)


def test_programs_are_small():
    x = da.ones((512, 64), chunks=(16, 64))
    count, of_ranks = programs(x, 20)
    sizes = [len(packed(each)) for each in of_ranks]
    assert sum(sizes) / count < 60
    assert sum(sizes) < sum(len(pickle.dumps(each)) for each in of_ranks) / 2


def test_what_is_packed_is_unpacked():
    for x in (
        da.ones((64, 64), chunks=(8, 64)),
        da.from_array(np.ones((512, 64)), chunks=(64, 64)),
    ):
        for program in programs(x, 2)[1]:
            found = unpacked(packed(program))
            assert found.uses == program.uses
            assert found.inputs == program.inputs
            assert found.literals.keys() == program.literals.keys()


def test_arrays_are_not_compressed():
    program = programs(da.from_array(np.ones((512, 64)), chunks=(64, 64)), 1)[1][0]
    assert len(packed(program)) > sum(each.nbytes for each in program.literals.values()) > 0
