"""A forward pass recorded on values without memory, and its nodes as layers."""
