"""The scheduler plugin, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from dask_p2p import scheduler as module
from dask_p2p.monitoring.records import Record, packed, unpacked
from dask_p2p.scheduler import P2PSchedulerPlugin
from dask_p2p.task import PLUGIN_NAME

OK = {"status": "OK", "result": None}


class Scheduler:
    """What the plugin needs of Dask's: workers answer what they are told to, then no more."""

    def __init__(self, **answers):
        self.records = {}  # what a worker answers who is asked for them
        self.answers = {worker: list(those) for worker, those in answers.items()}
        self.workers = dict.fromkeys(answers)
        self.plugins, self.handlers, self.worker_plugins, self.events = {}, {}, {}, []

    def rpc(self, worker):
        async def run(**request):
            if not self.answers[worker]:
                await asyncio.Event().wait()
            answer = self.answers[worker].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def p2p_records(since):
            answer = self.records[worker]
            if isinstance(answer, Exception):
                raise answer
            if answer == "still":
                await asyncio.Event().wait()
            nothing = packed([])
            return answer and {
                "first": since,
                "records": packed(answer[since:]),
                "under_way": nothing,
            }

        return SimpleNamespace(run=run, p2p_records=p2p_records)

    async def broadcast(self, **request):
        pass

    def log_event(self, topic, event):
        self.events.append((topic, pickle.loads(event["message"])))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)


def registered(scheduler):
    async def main():
        plugin = P2PSchedulerPlugin()
        await plugin.start(scheduler)
        answer = await scheduler.handlers["p2p_register"]()
        again = await plugin.register()
        await plugin.close()
        return answer, again

    return asyncio.run(main())


def test_workers_that_cannot_be_reached_are_tried_again():
    scheduler = Scheduler(a=[OSError("not now"), OSError("nor now"), OK, OK])
    assert registered(scheduler)[0] == {"failed": {}, "silent": []}
    assert PLUGIN_NAME in scheduler.worker_plugins, "who joins later has it too"


def test_workers_that_do_not_answer_are_named():
    answer, again = registered(Scheduler(a=[OK, OK], still=[]))
    assert answer == again == {"failed": {}, "silent": ["still"]}


def test_workers_that_cannot_take_part_are_named_until_they_can():
    error = {"status": "error", "exception_text": "ConfigError('option ...')"}
    answer, again = registered(Scheduler(a=[OK, OK], b=[error, OK]))
    assert answer["failed"] == {"b": "ConfigError('option ...')"}
    assert again["failed"] == {}


def test_another_dask_keeps_its_own_check_with_a_warning():
    scheduler = Scheduler()
    registered(scheduler)
    assert "_add_to_processing" not in vars(scheduler)
    ((topic, text),) = scheduler.events
    assert topic == "warn"
    assert "checks memory in another way" in text


def test_records_are_fetched_once_and_outlive_their_worker():
    scheduler = Scheduler(good=[OK], still=[OK], left=[OK], plain=[OK])
    noted = [Record(("y", i), float(i), i + 1.0, worker="good") for i in range(3)]
    scheduler.records = {"good": noted[:2], "still": "still", "left": OSError(), "plain": None}

    async def main():
        plugin = scheduler.plugins[PLUGIN_NAME] = P2PSchedulerPlugin()
        await plugin.start(scheduler)
        await plugin.register()
        del scheduler.workers["left"]
        answers = [await plugin.records()]
        scheduler.records["good"] = noted
        answers += await asyncio.gather(plugin.records(), plugin.records(since_s=1.5))
        plugin.remove_worker(scheduler, "good")
        answers += [await plugin.records("y"), await plugin.records("z"), await plugin.records(n=1)]
        assert plugin._ready()
        del scheduler.plugins[PLUGIN_NAME]
        assert plugin._ready() == [], "an open page asks nobody any more"
        await plugin.close()
        return answers

    answers = asyncio.run(main())
    assert {tuple(answer["silent"]) for answer in answers} == {("still",)}
    got = [unpacked(answer["records"]) for answer in answers]
    assert got == [noted[:2], noted, noted[2:], noted, [], noted]
