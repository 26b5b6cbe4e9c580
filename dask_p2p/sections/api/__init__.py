"""Functions and methods that users call: `spmd`, and the context of a rank."""
