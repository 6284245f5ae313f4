"""Planners: who does what in which order."""
