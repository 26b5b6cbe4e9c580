"""Programs of ranks, planned from the tasks of a graph, without a cluster."""
