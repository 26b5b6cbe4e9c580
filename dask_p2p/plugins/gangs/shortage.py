"""Reasons why a cluster's workers can never run all ranks of a gang at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dask_p2p.plans.seats import most_seated, room
from dask_p2p.plugins.seating import allowed_of, named_workers, needs_of

_MOST_NAMED = 4


def shortage(scheduler: Any, gang: str, tasks: Sequence[Any]) -> str:
    """Return why the present workers cannot run all tasks of a gang at the same time, and a remedy.

    The text is empty if they can, once other tasks have ended. Each set of needed units is checked
    alone. So the text may be empty for ranks that need different units and cannot run together.
    """
    kinds: dict[tuple[tuple[str, float], ...], list[Any]] = {}
    for ts in tasks:
        kinds.setdefault(tuple(sorted(needs_of(ts).items())), []).append(ts)
    for needs, alike in kinds.items():
        if text := _shortage(scheduler, f"{gang} has {len(tasks)} ranks", dict(needs), alike):
            return text
    return ""


def _shortage(scheduler: Any, gang: str, needs: Mapping[str, float], tasks: Sequence[Any]) -> str:
    """Return the same for tasks that need the same units."""
    workers = scheduler.workers.values()
    wants = Counter(allowed_of(scheduler, tasks))
    most = most_seated(wants, {ws.address: room(ws.resources, needs) for ws in workers})
    if most == len(tasks):
        return ""
    named = [ts.loose_restrictions or named_workers(scheduler, ts) for ts in tasks]
    restrictions = next(filter(None, map(_restrictions, tasks)), "")
    if not needs or not all(named):
        return (
            f"{gang}, which run at the same time, and {named.count(set()) or len(tasks) - most} of "
            f"them are restricted to workers that the cluster does not have ({restrictions}). Name "
            f"workers of the cluster by workers=, or give allow_other_workers=True."
        )
    among = set(workers) if True in named else set().union(*(each for each in named if each))
    fits = {name: sum(room(ws.resources, {name: needs[name]}) for ws in among) for name in needs}
    name = min(fits, key=lambda name: fits[name])
    have = sum(ws.resources.get(name, 0) for ws in among)
    may = f" that may run them ({restrictions})" if restrictions else ""
    enough = f"enough for {_counted(most, 'rank')}" if most else "too few for any rank"
    fewer = f"Give ranks={most}, or start" if most else "Start"
    return (
        f"{gang}, which run at the same time. {len(tasks)} of them need "
        f"{_counted(needs[name], 'unit')} of resource {name!r} each, and the workers{may} have "
        f"{_counted(have, 'unit')} in all, {enough}. "
        f"{fewer} workers with more units of {name!r} and wait for them with "
        f"client.wait_for_workers."
    )


def _restrictions(ts: Any) -> str:
    """Name the workers and hosts that a task is restricted to."""
    if ts.loose_restrictions:
        return ""
    named = sorted(map(str, {*(ts.worker_restrictions or ()), *(ts.host_restrictions or ())}))
    return ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")


def _counted(count: float, name: str) -> str:
    return f"{count:g} {name}{'s' * (count != 1)}"
