"""One rank executes a program: loop, strategies, data, checkpoints, resharding, verification."""
