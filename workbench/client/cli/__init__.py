"""Commands for people without a notebook; `python -m workbench --help` lists them."""
