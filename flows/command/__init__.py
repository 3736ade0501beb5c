"""The `rollflow` command but for its entry, `flows.cli`: nothing here is a flow."""
