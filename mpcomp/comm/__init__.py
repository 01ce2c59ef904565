"""Ranks and what moves between them: groups, channels, agreement, faults."""
