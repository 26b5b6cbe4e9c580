"""The scheduler plugin, without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.records import TaskRecord, packed, unpacked
from dask_p2p.plugins.gangs.scheduler import ORDER
from dask_p2p.plugins.placement import Overlay
from dask_p2p.plugins.scheduler import P2PSchedulerPlugin
from tests.clock import clocked

OK = {"status": "OK", "result": None}


class Scheduler:
    """What the plugin needs of Dask's: workers answer what they are told to, then no more."""

    def __init__(self, **replies):
        self.records = {}  # what a worker answers who is asked for them
        self.under_way = []  # records of running tasks on each worker
        self.replies = {worker: list(worker_replies) for worker, worker_replies in replies.items()}
        self.workers, self.tasks, self.task_groups = dict.fromkeys(replies), {}, {}
        self.plugins, self.handlers, self.worker_plugins = {}, {"adaptive_target": min}, {}

    def _add_to_processing(self, ts, ws, stimulus_id):
        pass

    is_rootish = decide_worker_non_rootish = _add_to_processing

    def add_plugin(self, plugin, name):
        self.plugins[name] = plugin

    def rpc(self, worker):
        async def run(**request):
            if not self.replies[worker]:
                await asyncio.Event().wait()
            reply = self.replies[worker].pop(0)
            if isinstance(reply, Exception):
                raise reply
            return reply

        async def p2p_records(since):
            reply = self.records[worker]
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, dict):
                return reply
            if reply == "still":
                await asyncio.Event().wait()
            return reply and {
                "first": since,
                "records": packed(reply[since:]),
                "under_way": packed(self.under_way),
            }

        return SimpleNamespace(run=run, p2p_records=p2p_records)

    async def broadcast(self, **request):
        pass


async def started(scheduler):
    plugin = scheduler.plugins[PLUGIN_NAME] = P2PSchedulerPlugin()
    await plugin.start(scheduler)
    return plugin


async def registered(scheduler):
    plugin = await started(scheduler)
    reply = await scheduler.handlers["p2p_register"]()
    again = await plugin.register()
    await plugin.close()
    return reply, again


@clocked
async def test_workers_that_cannot_be_reached_are_tried_again():
    scheduler = Scheduler(a=[OSError("not now"), OSError("nor now"), OK, OK])
    reply, _ = await registered(scheduler)
    assert reply == {"status": "ok", "failed": {}, "silent": [], "workers": 1}
    assert PLUGIN_NAME in scheduler.worker_plugins, "who joins later has it too"


@clocked
async def test_workers_that_do_not_answer_are_named():
    reply, again = await registered(Scheduler(a=[OK, OK], still=[]))
    assert reply == again == {"status": "ok", "failed": {}, "silent": ["still"], "workers": 2}


@clocked
async def test_clients_that_register_at_the_same_time():
    """One of them repeats the installation while the other one waits for its end."""
    plugin = await started(Scheduler(a=[OK] * 9, b=[OK] * 9))
    requests = [asyncio.ensure_future(plugin.register())]
    for _ in range(3):
        while not plugin.ready():
            await asyncio.sleep(0)
        requests.append(asyncio.ensure_future(plugin.register()))
        await asyncio.sleep(0)
        assert sorted(plugin.ready()) == ["a", "b"], "as before"
    replies = await asyncio.gather(*requests)
    assert [reply["silent"] for reply in replies] == [[]] * 4
    await plugin.close()


@clocked
async def test_workers_that_cannot_take_part_are_named_until_they_can():
    error = {"status": "error", "exception_text": "ConfigError('option ...')"}
    reply, again = await registered(Scheduler(a=[OK, OK], b=[error, OK]))
    assert reply["failed"] == {"b": "ConfigError('option ...')"}
    assert again["failed"] == {}


@clocked
async def test_records_are_fetched_once_and_outlive_their_worker():
    scheduler = Scheduler(good=[OK], still=[OK], left=[OK], plain=[OK], refuses=[OK])
    noted = [
        TaskRecord((name, 0), float(i), i + 1.0, worker="good") for i, name in enumerate("xyz")
    ]
    running = TaskRecord(("w", 0), 5.0, 6.0, worker="good", wanted_bytes=0)
    scheduler.records = {"good": noted[:2], "still": "still", "left": OSError(), "plain": None}
    scheduler.records["refuses"] = {"status": "error", "message": "since: expected an integer"}
    plugin = await started(scheduler)
    await plugin.register()
    del scheduler.workers["left"]
    replies = [await plugin.records()]
    scheduler.records["good"], scheduler.under_way = noted, [running]
    replies += [await plugin.records(n=1)]
    scheduler.under_way = [noted[2]]  # it ends between the requests to two workers
    replies += await asyncio.gather(plugin.records(), plugin.records())
    plugin.remove_worker(scheduler, "good")
    replies += [await plugin.records(n=n) for n in (1, 9)]
    assert plugin.ready()
    del scheduler.plugins[PLUGIN_NAME]
    assert plugin.ready() == [], "an open page asks nobody any more"
    await plugin.close()
    assert {tuple(reply["silent"]) for reply in replies} == {("still", "refuses")}
    records = [unpacked(reply["records"]) for reply in replies]
    assert records == [noted[:2], [running], noted, noted, noted[2:], noted[::-1]]


@pytest.mark.parametrize("is_removed", ["off", "by another"])
@clocked
async def test_a_plugin_that_was_taken_off_comes_back_with_a_rank(is_removed):
    """Ranks go on asking, and tasks are placed as before."""
    scheduler = Scheduler()
    plugin = await started(scheduler)
    del scheduler.plugins[PLUGIN_NAME]
    order = scheduler.handlers[ORDER]  # a request that arrived before
    if is_removed == "by another":
        await plugin.close()
        plugin = await started(scheduler)
    overlay = scheduler.is_rootish
    reply = await order(gang="x", rank=0, token="t", known_state="running")
    assert reply["state"] == "stopped"
    assert scheduler.plugins == {PLUGIN_NAME: plugin}
    assert isinstance(scheduler.is_rootish, Overlay)
    is_same = scheduler.is_rootish is overlay
    assert is_same == (is_removed == "by another"), "the other one goes on as before"
    await plugin.close()
