"""The simulated timeline of a step: operation times, overlap, and waiting between ranks."""
