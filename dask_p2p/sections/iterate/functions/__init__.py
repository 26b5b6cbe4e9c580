"""The functions of users: their parameters, what they write, and what their code depends on."""
