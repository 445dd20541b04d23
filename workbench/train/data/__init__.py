"""What a rank trains and is evaluated on."""
