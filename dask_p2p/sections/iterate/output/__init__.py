"""Output of a loop while it runs: series of numbers, frames and checkpoints."""
