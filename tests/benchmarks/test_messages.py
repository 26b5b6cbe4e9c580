from __future__ import annotations

import pytest

from benchmarks import messages, messages_gpu
from benchmarks.rivals.mpi_messages import ALLREDUCE, INTO, NEW, NUMBER
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


@pytest.mark.parametrize(("ranks", "ways"), [(2, {NUMBER, NEW, INTO, ALLREDUCE}), (3, {ALLREDUCE})])
def test_what_is_measured_and_written(tmp_path, monkeypatch, ranks, ways):
    monkeypatch.setattr(messages, "find_spec", lambda name: None)  # without mpi4py
    options = f"--bytes 8 --bytes 32768 --rounds 1 --repeats 2 --ranks {ranks}"
    made, _ = results_of(messages, tmp_path, options)
    for row in made["rows"]:
        times_s = row["times_s"]["dask_p2p"]
        assert times_s.keys() == (ways if row["bytes"] == 8 else ways - {NUMBER})
        assert all(time_s > 0 for time_s in times_s.values())


def test_the_program_for_gpus_on_cpus():
    """Without the plain copy and NCCL, which need GPUs."""
    sums = 1 << 20
    first, second = messages_gpu.measured([64, sums], 1, on_cpu=True)
    assert (first["bytes"], second["bytes"]) == (64, sums)
    assert first["times_s"].keys() == {NEW, INTO}
    assert second["times_s"].keys() == {NEW, INTO, ALLREDUCE}
    assert all(time_s > 0 for time_s in second["times_s"].values())
