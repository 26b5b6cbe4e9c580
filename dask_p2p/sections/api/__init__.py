"""`spmd`: checks of its arguments, the graph of a section, and the work and outputs of a rank."""
