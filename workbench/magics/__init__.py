"""Words for notebooks: `%load_ext workbench`, then `%wb status` and `%%ranks`."""

from workbench.magics.magics import register

__all__ = ["register"]
