"""`iterate`: the loop of a rank, and checks of its first step."""
