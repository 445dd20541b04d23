"""What a cluster's machine is like, by measurement."""
