"""Words for notebooks: `%load_ext workbench`, then `%wb status` and `%%ranks`."""

from workbench.magics.register import register

__all__ = ["register"]
