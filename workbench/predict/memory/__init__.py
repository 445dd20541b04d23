"""The memory of a step on every rank: tensors as they come and go, instruction by instruction."""
