"""The context of a rank: the methods that the user's function calls."""
