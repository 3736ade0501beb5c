"""Metrics, trackers, curves."""
