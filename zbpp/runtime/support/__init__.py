"""Helpers for every package of the runtime; they import none of these packages."""
