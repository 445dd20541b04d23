"""The tracing of a torch model into a `Graph`: recording, trying and classifying operations."""
