"""The interval of Dask's profiler on a worker."""

from __future__ import annotations

from types import SimpleNamespace

from dask_p2p.plugins.dask_internals import PROFILE, SamplingInterval


def test_the_longer_interval_counts_until_it_is_taken_back():
    callback = SimpleNamespace(callback_time=10)
    interval = SamplingInterval(SimpleNamespace(periodic_callbacks={PROFILE: callback}))
    seen = []
    for least_ms in (100, 5, 0):
        interval.set_least(least_ms)
        seen.append(callback.callback_time)
    assert seen == [100, 10, 10]


def test_without_a_profiler_nothing_is_changed():
    worker = SimpleNamespace(periodic_callbacks={})
    SamplingInterval(worker).set_least(100)
    assert worker.periodic_callbacks == {}
