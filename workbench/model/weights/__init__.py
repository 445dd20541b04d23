"""Weights in files: whole or in slices, initial or from a checkpoint."""
