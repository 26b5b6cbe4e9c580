"""Pipelines that move parts of host arrays through a GPU."""
