"""The functions of users: their parameters, their writes, and the values that their code reads."""
