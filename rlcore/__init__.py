"""Everything that exists without Prefect."""
