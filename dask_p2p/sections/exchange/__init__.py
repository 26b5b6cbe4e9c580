"""Exchanges between local blocks of ranks: halos, redistribution."""
