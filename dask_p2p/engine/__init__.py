"""One worker's work for one output block: the task, its assembly, and reads from other workers."""
