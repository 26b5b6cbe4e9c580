"""Steps that a GPU replays as one graph, without the host."""
