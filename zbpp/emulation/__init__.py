"""Stages that sleep instead of computing: schedules measured on few cores."""
