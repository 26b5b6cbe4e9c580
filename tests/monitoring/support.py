"""Records as workers would make them."""

from dask_p2p.monitoring.records import TaskRecord

NAME = "p2p-transpose-0123456789abcdef0123456789abcdef"


def record(i, start_s=0.0, stages=(), **values):
    """Of an attempt at block ``i`` of two, on worker a, that took a second."""
    values = {"worker": "a", "array_shape": (4, 2), "blocks": (2, 1)} | values
    name = values.pop("name", NAME)
    stop_s = values.pop("stop_s", start_s + 1)
    return TaskRecord((name, i, 0), start_s, stop_s, stages, **values)
