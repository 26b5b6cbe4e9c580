"""Transports by which a reader reads a holder's memory itself: both are of one host."""
