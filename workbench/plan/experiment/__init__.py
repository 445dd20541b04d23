"""The experiment, its synchronisation strategy and codec, and the measurements of a run."""
