"""A stand-in for Dask's scheduler: workers with units of resources, and tasks of a gang."""

import pickle

from dask_p2p.engine.task import RankTask
from dask_p2p.plugins.gangs.coordinator import COMMIT


class Task:
    def __init__(self, key, needs=None, workers=None, hosts=None, loose=False, is_rank=True):
        self.key, self.state, self.processing_on = key, "no-worker", None
        self.resource_restrictions, self.loose_restrictions = needs, loose
        self.worker_restrictions, self.host_restrictions = workers, hosts
        self.dependencies, self.dependents = set(), set()
        self.run_spec = object.__new__(RankTask) if is_rank else None


def ranks(count, *args, **kwargs):
    """Tasks of all ranks of a gang."""
    return [Task(("x", rank), *args, **kwargs) for rank in range(count)]


class Worker:
    def __init__(self, name, units):
        self.address, self.host, self.resources, self.nthreads = name, f"host-{name}", units, 1
        self.executing, self.processing, self.long_running = {}, set(), set()

    def executes(self, task, seconds):
        """Begin to run a task, which has run for some seconds."""
        self.executing[task] = seconds
        self.processing.add(task)


class Scheduler:
    """Has a worker a, b, ... for each set of resources, with a thread each."""

    def __init__(self, *resources):
        self.tasks, self.ended, self.moved, self.warnings = {}, {}, [], []
        self.workers = {}
        for name, units in zip("abcdefgh", resources, strict=False):
            self.add_worker(name, units)

    def add_worker(self, name, units):
        self.workers[name] = Worker(name, units)

    @property
    def running(self):
        return {*self.workers.values()}

    def gang(self, *tasks, name="x"):
        """Add the tasks of a gang, which wait for a worker; return all keys."""
        commit = Task((name, COMMIT), is_rank=False)
        commit.state, commit.dependencies = "waiting", {*tasks}
        self.tasks |= {task.key: task for task in (*tasks, commit)}
        return list(self.tasks)

    def coerce_hostname(self, host):
        return host

    def transitions(self, recommendations, stimulus_id):
        for key, finish in recommendations.items():
            if finish == "erred":
                self.tasks[key].state = "erred"
                self.ended[key] = pickle.loads(self.tasks[key].exception)
            else:
                self.moved.append(key)

    def log_event(self, topic, event):
        self.warnings.append(pickle.loads(event["message"]))
