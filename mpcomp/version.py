"""The version of this package; ranks compare it before they work together."""

__version__ = "0.2.0"
