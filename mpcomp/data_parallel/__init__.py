"""Gradient compression between replicas: methods, and how gradients travel."""

from mpcomp.core.spec import import_all

import_all(__name__, __path__)
