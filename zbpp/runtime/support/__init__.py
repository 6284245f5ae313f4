"""Helpers that every room of the runtime may use; they use none of the rooms."""
