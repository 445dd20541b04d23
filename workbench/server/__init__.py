"""The job server: a process that schedules, watches and recovers, and that holds no model data."""
