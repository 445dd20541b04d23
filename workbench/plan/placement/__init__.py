"""The placement of weights and activations, and the conversions between layers."""
