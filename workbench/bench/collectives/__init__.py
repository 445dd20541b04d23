"""All-reduce algorithms against gloo's: in shared memory, over links, between hosts."""
