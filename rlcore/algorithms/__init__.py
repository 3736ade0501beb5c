"""Pure functions of tensors and numbers."""
