"""Charts and treemaps as SVG, in the colors of the notebook's theme or on white."""
