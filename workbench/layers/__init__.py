"""Layers of which a rank computes a part, and `cut`, which applies a plan to a whole model."""
