"""Agent loops and the worker that runs their sessions."""
