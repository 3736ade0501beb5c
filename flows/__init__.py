"""What runs and in which order: one @flow per file."""
