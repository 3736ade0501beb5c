"""The training worker: log-probs, updates, checkpoints of one rank."""
