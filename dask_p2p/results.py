"""Classes of values that functions of this package return, or pass to users' functions.

>>> from dask_p2p.results import HaloArray

They are for annotations and `isinstance`: the context of a section, halo arrays, runs, reports.
"""

from __future__ import annotations

from dask_p2p.fusing.compiled import CompiledFunction
from dask_p2p.fusing.resident.client import Handle, ResidentGang
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.monitoring.runs import Run, RunTable
from dask_p2p.ops.estimate import MemoryEstimate
from dask_p2p.sections.api.rank_body import SectionEstimate
from dask_p2p.sections.context.communicator import Communicator
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.grids import Grid, LocalPoints
from dask_p2p.sections.context.messages import Transfer
from dask_p2p.sections.context.state import State
from dask_p2p.sections.exchange.boundaries import At
from dask_p2p.sections.exchange.halo import HaloArray, HaloPart, Pending
from dask_p2p.tools.check import Link, Problem, Report
from dask_p2p.tools.dropin import Installation
from dask_p2p.tools.progress import RankReport

# fmt: off
__all__ = [
    "At", "Communicator", "CompiledFunction", "Context", "Grid", "HaloArray", "HaloPart",
    "Handle", "Installation", "Link", "LocalPoints", "MemoryEstimate",
    "Pending", "Problem", "RankReport", "Report", "ResidentGang", "Run",
    "RunTable", "SectionEstimate", "State", "TaskRecord", "Transfer",
]
