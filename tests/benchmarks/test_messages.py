from __future__ import annotations

from itertools import count

import pytest

from benchmarks import messages, messages_gpu
from benchmarks.rivals.mpi_messages import ALLREDUCE, INTO, NEW, NUMBER, least_s, rounds_of
from tests.benchmarks.support import results_of


@pytest.mark.cluster
@pytest.mark.parametrize(("ranks", "ways"), [(2, {NUMBER, NEW, INTO, ALLREDUCE}), (3, {ALLREDUCE})])
def test_what_is_measured_and_written(tmp_path, monkeypatch, ranks, ways):
    monkeypatch.setattr(messages, "find_spec", lambda name: None)  # without mpi4py
    options = f"--bytes 8 --bytes 32768 --rounds 1 --repeats 2 --ranks {ranks}"
    made, _ = results_of(messages, tmp_path, options)
    for row in made["rows"]:
        times_s = row["times_s"]["dask_p2p"]
        assert times_s.keys() == (ways if row["bytes"] == 8 else ways - {NUMBER})
        assert all(time_s > 0 for time_s in times_s.values())


@pytest.mark.cluster
def test_the_program_for_gpus_on_cpus():
    """Without the plain copy and NCCL, which need GPUs."""
    sums = 1 << 20
    first, second = messages_gpu.measured([64, sums], 1, on_cpu=True)
    assert (first["bytes"], second["bytes"]) == (64, sums)
    assert first["times_s"].keys() == {NEW, INTO}
    assert second["times_s"].keys() == {NEW, INTO, ALLREDUCE}
    assert all(time_s > 0 for time_s in second["times_s"].values())


def test_the_least_of_alternating_runs():
    first, second = iter([3.0, 1.0, 2.0]), iter([5.0, 6.0, 4.0])
    ways = {"a": lambda: {"x": next(first)}, "b": lambda: {"x": next(second)}}
    assert messages.in_turn(ways, 3) == {"a": {"x": 1.0}, "b": {"x": 4.0}}


def test_the_least_of_rounds():
    calls = count()
    assert least_s(lambda: None, lambda: next(calls), 3, 4) > 0
    assert next(calls) == 12
    assert rounds_of(8, 2) == (20, 50)
    assert rounds_of(1 << 20, 2) == (2, 2)
