"""Jobs as values, the file that holds them, and who gets which engines when; without torch."""
