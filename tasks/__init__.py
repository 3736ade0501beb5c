"""How Prefect runs one phase: options, retries, names, artifacts, the Ray task runner."""
