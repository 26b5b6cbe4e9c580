"""Exchanges between GPUs, by windows and CUDA IPC; captured steps."""
