"""The typed configuration tree with verl's names."""

from rlcore.config.run import RunConfig

__all__ = ["RunConfig"]
