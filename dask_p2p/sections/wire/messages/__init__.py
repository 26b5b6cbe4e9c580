"""Messages between two ranks: their format, those in transit, and waits in a circle."""
