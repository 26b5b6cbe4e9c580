"""Connections between ranks: memory, sockets and UCX."""
