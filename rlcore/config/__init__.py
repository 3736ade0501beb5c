"""The typed configuration tree with verl's names.

`RunConfig` is verl's tree as frozen pydantic models. A key is one of three: *honoured* (a field
that is read), *satisfied* (asks for what happens anyway: one notice) or *refused* (asks for what is
not done, with reason and fix). All problems are reported at once, by one `ConfigError`.

    base data actor critic algorithm rollout reward queue trainer run
                                          the tree, one file a section; add a key there
    pending                               markers of keys that are not read yet
    names                                 names that ship; users register others
    arguments corrections deviations      from keys to arguments of algorithms; where verl differs
    rules rules_*                         what must hold between keys
    verl_keys                             verl's other keys, and refused values
    presets overrides tree load           YAML and `a.b=c` to a checked tree
    script shell                          scripts of verl's
    problems report memory model_shape    how it is told, and what a run takes
    schema docs                           JSON Schema, README tables

Nothing here imports torch, ray, prefect or transformers.
"""

from rlcore.config.load import ResolvedConfig, load_config, resolve_config
from rlcore.config.presets import find_preset, preset_names
from rlcore.config.run import RunConfig
from rlcore.config.trainer import PHASES

__all__ = [
    "PHASES",
    "ResolvedConfig",
    "RunConfig",
    "find_preset",
    "load_config",
    "preset_names",
    "resolve_config",
]
