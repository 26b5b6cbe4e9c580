"""Lines for runs in the scheduler's log."""

from __future__ import annotations

import asyncio
import logging

import dask
import dask.array as da
import pytest

import dask_p2p
from dask_p2p.monitoring import run_log
from dask_p2p.monitoring.records import Fallback, Stage
from dask_p2p.monitoring.run_log import RunLog
from tests.monitoring.test_records import record
from tests.support import in_process


def test_a_run_ends_with_its_last_block():
    log = RunLog()
    log.add([record(0, 1.0)])
    assert log.ended(2.5) == []
    log.add([record(1, 1.5)])
    (run,) = log.ended(2.5)
    assert [r.key[1] for r in run.records] == [0, 1]
    assert log.ended(100.0) == []


def test_a_run_of_some_blocks_ends_when_nothing_follows():
    log = RunLog()
    log.add([record(0, 1.0)])
    assert log.ended(2.0 + run_log._QUIET_S - 0.1) == []
    assert len(log.ended(2.0 + run_log._QUIET_S + 0.1)) == 1
    slow = record(0, 1.0)._replace(stop_s=101.0)
    log.add([slow])
    assert log.ended(300.0) == [], "its other tasks may take as long"
    assert len(log.ended(302.0)) == 1


def test_a_run_ends_when_its_array_is_made_again():
    log = RunLog()
    log.add([record(0, 1.0), record(0, 3.0), record(1, 3.5), record(0, 3.2, name="p2p-rechunk-x")])
    assert [(run.start_s, run.attempts) for run in log.ended(4.5)] == [(1.0, 1), (3.0, 2)]
    assert [run.operation for run in log.ended(100.0)] == ["p2p-rechunk-x"]


def test_a_line():
    stages = (Stage("b", "cma", 3_000_000), Stage("c", "comm", 1_000_000))
    log = RunLog()
    log.add([record(0, 1.0, stages, dtype="f4"), record(1, 1.5)])
    (run,) = log.ended(3.0)
    assert run_log._line(run) == (
        "p2p-transpose of 4 x 2 f4, 2 of 2 x 1 blocks: moved 3.81 MiB in 1.50 s (0.00267 GB/s) by "
        "cma 1, comm 1"
    )
    fallbacks = (Fallback("c", "cma", "why"),)
    log.add([record(0, 5.0, error="why"), record(0, 6.0, fallbacks=fallbacks), record(1, 6.0)])
    (run,) = log.ended(8.0)
    assert run_log._line(run).endswith("by -, 3 attempts, 1 fallbacks")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_scheduler_logs_runs_where_it_is_asked_to(wanted, monkeypatch, caplog):

    monkeypatch.setattr(run_log, "_LOOK_S", 0.01)

    def lines():
        return [r for r in caplog.records if r.name == run_log.logger.name]

    async def main():
        async with in_process() as (_, client):
            await dask_p2p.register(client)
            for _ in range(2):
                await client.compute(dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6))))
            for _ in range(500 if wanted else 10):
                await asyncio.sleep(0.01)
                if len(lines()) == 2:
                    break

    with dask.config.set({"p2p.log-runs": wanted}), caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert len(lines()) == 2 * wanted
    for line in lines():
        assert line.levelno == logging.INFO
        assert "p2p-transpose of 6 x 8 float64, 4 of 4 x 1 blocks: moved" in line.getMessage()
    others = [r for r in caplog.records if r.name.startswith("dask_p2p")]
    assert not others, "a healthy run says nothing"
