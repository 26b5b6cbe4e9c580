"""The scheduler plugin, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from dask_p2p import scheduler as module
from dask_p2p.scheduler import P2PSchedulerPlugin
from dask_p2p.task import PLUGIN_NAME

OK = {"status": "OK", "result": None}


class Scheduler:
    """What the plugin needs of Dask's: workers answer what they are told to, then no more."""

    def __init__(self, **answers):
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

        return SimpleNamespace(run=run)

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
