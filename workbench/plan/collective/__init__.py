"""All-reduce algorithms and codecs, by name."""
