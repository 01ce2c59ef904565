"""Gradient compression between replicas: methods, and how gradients travel."""
