"""Ranks of a gang that run their programs."""
