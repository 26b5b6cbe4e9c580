"""Kernels: permuted copies on GPUs, and checksums."""
