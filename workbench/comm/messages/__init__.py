"""What travels between ranks, what counts it, and what waits for it."""
