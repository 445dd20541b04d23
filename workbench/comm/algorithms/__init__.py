"""All-reduce algorithms, each a sequence of rounds."""
