"""Scoring of trajectories."""
