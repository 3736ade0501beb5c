"""PPOTrainer, its phases and hooks, and the modes."""
