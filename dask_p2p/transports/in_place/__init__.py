"""Transports whose reader reads the holder's memory itself, on one host."""
