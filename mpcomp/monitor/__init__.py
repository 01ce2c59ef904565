"""Figures of a run, sent and timed: reports, logs, windows of steps, traces, the pay-off."""
