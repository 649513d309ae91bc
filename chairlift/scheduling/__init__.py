"""Policy: which tokens are computed in the next step, and where their keys and values live.

Imports the standard library alone, so that it runs under a virtual clock, in property tests, and in a reader's head.
"""
