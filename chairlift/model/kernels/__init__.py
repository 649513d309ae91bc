"""Compiled kernels, each held to a plain form that it must equal."""
