"""Gangs: their scheduling, the task of a rank, checkpoints."""
