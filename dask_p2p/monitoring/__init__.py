"""What happened: one record for each attempt at a task, and what is drawn from them."""
