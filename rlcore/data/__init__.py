"""Prompts: files, checks at the door, order, preparation."""
