"""Tools around the operations: `check`, `install`, `local_cluster`, arrays in files."""
