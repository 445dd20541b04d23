"""A run goes on under another plan."""
