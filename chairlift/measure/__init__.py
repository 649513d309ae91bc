"""Workloads, metric definitions, the comparison of policies, and the load generator."""
