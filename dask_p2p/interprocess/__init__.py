"""What processes have of each other: shared memory, messages, and checks of what they send."""
