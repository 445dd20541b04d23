"""One rank's part of one layer, and what it computes with."""
