"""Loggers: where the steps of a run are reported to, while somebody follows it."""
