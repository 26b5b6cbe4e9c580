"""Fused graphs: the tasks of a whole Dask graph, shared out between the ranks of one gang.

The client reads the graph (`tasks`). It chooses the rank of each task (`owners`) and the exchange
that precedes it (`supersteps`), and writes a program for each rank (`planner`). Each rank runs its
program (`runner`), and exchanges values with the others (`messages`).
"""
