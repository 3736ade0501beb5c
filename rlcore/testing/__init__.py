"""Fakes and tiny models that implement the real contracts; for users too."""
