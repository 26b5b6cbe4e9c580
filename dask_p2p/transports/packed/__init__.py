"""Transports whose holder packs regions. They differ in the memory that receives the bytes."""
