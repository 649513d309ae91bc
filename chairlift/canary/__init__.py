"""Moves live traffic from one server to another, a share at a time, while its gates hold."""
