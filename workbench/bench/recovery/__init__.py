"""Processes killed during runs: what survives, and how soon."""
