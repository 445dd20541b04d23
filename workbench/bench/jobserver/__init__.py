"""The job server: the quality of its schedule, its cost, and its traffic."""
