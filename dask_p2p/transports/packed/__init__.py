"""Transports whose holder packs: they differ in where the bytes land."""
