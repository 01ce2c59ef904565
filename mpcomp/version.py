"""The version of this package; ranks compare it before they work together."""

__version__ = "0.1.0"
