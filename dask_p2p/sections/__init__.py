"""Sections: gangs of tasks that run at the same time, and exchange data while they run."""

from dask_p2p.sections.context.context import Context

__all__ = ["Context"]
