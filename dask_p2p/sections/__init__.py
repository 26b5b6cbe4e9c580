"""Sections: gangs of tasks that run at the same time, and exchange data while they run."""

from dask_p2p.sections.api.context import Context

__all__ = ["Context"]
