"""Placement and Ray actors: thin shells round plain objects."""
