"""The plan space: all plans of a model as the paths of a trellis."""
