"""The typed configuration tree with verl's names."""
