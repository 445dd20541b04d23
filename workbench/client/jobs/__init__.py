"""Jobs as a notebook sees them: the table, their results, sweeps."""
