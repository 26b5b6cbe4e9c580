"""Gangs that stay on their workers between the calls of a compiled function."""
