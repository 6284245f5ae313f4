"""Time a schedule, measure it, draw it."""
