"""mpcomp in transformers: its `Trainer`, loops with accelerate, and the pipeline it makes itself.

The names stand in ``__init__.pyi``; each is imported when it is first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
