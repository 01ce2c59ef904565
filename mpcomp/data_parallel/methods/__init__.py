"""Methods between replicas: each published one is a file, with whatever it alone needs."""

from mpcomp.core.spec import import_all
from mpcomp.data_parallel.methods.compressed import Compressed, param_comp_of, replica_method_of

__all__ = ["Compressed", "param_comp_of", "replica_method_of"]

import_all(__name__, __path__)
