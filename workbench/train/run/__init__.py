"""A training run on one rank, from its first slice of the weights to its last checkpoint."""
