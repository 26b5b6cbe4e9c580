"""Fused graphs: the tasks of a whole Dask graph, shared out between the ranks of one gang.

The client reads the graph (`planning.tasks`). It chooses the rank of each task (`planning.owners`)
and the exchange that precedes it, and writes a program for each rank (`planning.planner`). Each
rank runs its program (`running.gang`), and exchanges values with the others (`running.messages`).
"""
