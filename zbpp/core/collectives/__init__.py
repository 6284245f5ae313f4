"""Replicas of stages: words for what they divide, and rules for their collectives."""
