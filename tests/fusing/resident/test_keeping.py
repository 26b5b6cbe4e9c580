from __future__ import annotations

from dask_p2p.fusing.resident.client_streams import KeepingRule
from dask_p2p.fusing.resident.commands import CALL, KEEP, CommandLog
from tests.support import tune

TWO = [("a", "", 0), ("b", "", 0)]
ONE = [("a", "", 0), ("a", "", 0)]


def log_of(calls, most=100):
    log = CommandLog(2, most)
    for number in range(calls):
        log.add(CALL, [-1], number)
    return log


def test_a_checkpoint_is_due_after_many_commands(monkeypatch):
    tune(monkeypatch, kept_commands=3)
    rule, log = KeepingRule(), log_of(2)
    assert not rule.is_due(log, TWO)
    log.add(CALL, [-1], 2)
    assert rule.is_due(log, TWO)
    log.add(KEEP)
    assert not rule.is_due(log, TWO), "one is under way"


def test_a_checkpoint_is_due_after_some_time(monkeypatch):
    rule = KeepingRule()
    assert not rule.is_due(log_of(1), TWO)
    tune(monkeypatch, kept_s=0)
    assert rule.is_due(log_of(1), TWO)


def test_a_checkpoint_is_due_after_a_loss():
    rule = KeepingRule()
    rule.restart()
    assert not rule.is_due(log_of(1), ONE), "it would be lost with the worker"
    assert not rule.is_due(log_of(1), []), "the ranks have not begun"
    assert rule.is_due(log_of(1), TWO)
    assert not rule.is_due(log_of(1), TWO)


def test_a_log_of_one_worker_is_bounded():
    assert KeepingRule().is_due(log_of(2, most=2), ONE)
