"""Numbers in checkpoints in memory."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.iterate.fields import Scalars, make_scalar_spec
from dask_p2p.sections.iterate.functions import bind_by_name
from dask_p2p.sections.iterate.output.series import NumberState, Record, Series, SeriesSpec
from tests.sections.emulated import emulated_gpu
from tests.sections.gangs import run_gang

EVERY, STEPS = 2, 7


def numbers(ctx):
    scalars = Scalars(
        [make_scalar_spec("t", 0.5, None), make_scalar_spec("n", np.int32(3), None)], ctx
    )
    record = Record(lambda t: t, EVERY)
    spec = SeriesSpec("times", record, bind_by_name(record.function, ["t"]))
    series = Series([spec], STEPS, ctx)
    return NumberState(ctx.device, scalars, series), scalars, series


def check_numbers(ctx, step):
    state, scalars, series = numbers(ctx)
    for steps_done in range(1, step + 1):
        scalars.update({"t": 0.5 + steps_done})
        if series.is_due(steps_done):
            series.record(steps_done, lambda binding: scalars.values)
    state.save()
    later, new_scalars, new_series = numbers(ctx)
    for array, saved in zip(later.arrays, state.arrays, strict=True):
        array[...] = saved
    later.load(step)
    assert new_scalars.values == scalars.values
    assert [type(number) for number in new_scalars.values.values()] == [np.float64, np.int32]
    assert new_series.last == series.last
    assert np.array_equal(new_series.results(), series.results(), equal_nan=True)


@pytest.mark.parametrize("step", [0, 1, 4, 7])
def test_numbers_are_those_of_the_checkpoint(step):
    check_numbers(Context(RankGrid.in_line(1)), step)


@pytest.mark.parametrize("step", [0, 7])
def test_numbers_pass_through_arrays_of_a_gpu(monkeypatch, step):
    def function(ctx):
        with ctx.device.running([]):
            state, _, _ = numbers(ctx)
            assert all(map(ctx.device.holds, state.arrays))
            check_numbers(ctx, step)

    gpu = emulated_gpu(monkeypatch)
    run_gang(RankGrid.in_line(2), function, device=Gpu)
    gpu.check()
