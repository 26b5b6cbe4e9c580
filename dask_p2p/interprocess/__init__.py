"""Shared memory and messages between processes, and checks of received requests."""
