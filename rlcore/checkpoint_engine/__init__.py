"""Weight updates from trainer to replicas, as transactions."""
