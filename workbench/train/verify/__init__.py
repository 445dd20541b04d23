"""The split model against the unsplit one."""
