"""mpcomp: model-parallel training over slow links, with compressed cuts.

pipe = mpcomp.pipeline(model, chunks=8, split=4, act_comp="topk:0.1", grad_comp="topk:0.2",
                       loss_fn=F.cross_entropy)
loss = pipe.forward_backward(x, y)

The public names stand in ``__init__.pyi``, once, for type checkers, editors and the loader: each is
imported when it is first asked for, so a module of one room loads those below it and no others.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
