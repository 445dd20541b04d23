"""What extensions are checked for, with a cluster at hand."""
