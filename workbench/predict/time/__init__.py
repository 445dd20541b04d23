"""A step in time: seconds of its instructions, what overlaps, and who waits for whom."""
