"""The model as a value."""
