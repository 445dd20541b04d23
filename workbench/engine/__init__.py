"""What an engine executes: one rank's part of a job, called by the job server."""
