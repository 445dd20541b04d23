"""Reports, progress, networks, and the systems that are measured in turns."""
