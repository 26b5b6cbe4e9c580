"""The record of a task's attempt, while the task runs and when it has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_p2p.engine.context import recorded, where_is
from dask_p2p.monitoring.records import TaskRecord

KEY = ("x", 0)


class Worker:
    def __init__(self):
        self.running, self.records = {}, []

    def record(self, record):
        self.records.append(record)


def made(is_running=False, **fields):
    return TaskRecord(KEY, 0.0, 1.0, wanted_bytes=0 if is_running else None, **fields)


def test_an_attempt_that_succeeds():
    worker = Worker()
    with recorded(worker, KEY, made) as fields:
        assert worker.running[KEY]() == made(is_running=True)
        assert not worker.records
        fields["nbytes"] = 8
    assert worker.records == [made(nbytes=8)]
    assert not worker.running


def test_an_attempt_that_fails():
    worker = Worker()
    with pytest.raises(ValueError, match="wrong"), recorded(worker, KEY, made):
        raise ValueError("wrong")
    assert worker.records == [made(error="ValueError: wrong")]
    assert not worker.running


def test_only_the_named_errors_are_recorded():
    worker = Worker()
    with pytest.raises(ValueError, match="wrong"), recorded(worker, KEY, made, OSError):
        raise ValueError("wrong")
    assert not worker.records
    assert not worker.running


def test_the_name_of_a_worker_in_errors():
    assert where_is(None) == "this process"
    assert where_is(SimpleNamespace(address="tcp://a:1")) == "worker tcp://a:1"
