"""Engines of unequal speed: shares, re-balancing during training, and the cost of resharding."""
