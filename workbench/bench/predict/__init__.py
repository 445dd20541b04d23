"""Predicted memory, traffic and time against measured ones, and the speed of predictions."""
