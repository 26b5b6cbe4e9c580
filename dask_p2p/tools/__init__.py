"""What is built of operations: `check`, `install`, `local_cluster`, arrays in files."""
