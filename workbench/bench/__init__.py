"""Side-by-side measurements: `python -m workbench.bench NAME`."""
