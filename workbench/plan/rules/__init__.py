"""Rules that make plans for whole models."""
