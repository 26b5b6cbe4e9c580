"""What one worker does for one output block: its task, its assembly, what is read of others."""
