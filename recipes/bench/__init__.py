"""Measurements: one script for one question."""
