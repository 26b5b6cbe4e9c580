"""Host memory and the hardware of a process: pages, threads, pinned memory."""
