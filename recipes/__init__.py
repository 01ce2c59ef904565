"""Runnable experiments: each recipe chooses and combines what mpcomp offers."""
