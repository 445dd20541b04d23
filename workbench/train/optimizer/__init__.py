"""A rank's optimizer: who moves what, what is remembered of it, and a strategy's own rules."""
