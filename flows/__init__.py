"""What runs and in which order: one @flow per file."""

from flows.command.environment import prepare_ray_environment

# Before anything here imports Ray, which reads its authentication mode then.
prepare_ray_environment()
