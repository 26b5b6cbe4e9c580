"""Gangs, as Dask's scheduler and workers see them: tasks that run at the same time."""
