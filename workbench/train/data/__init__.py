"""Labelled images for one rank, from where they are kept."""
