"""mpcomp: model-parallel training over slow links, with compressed cuts.

pipe = mpcomp.pipeline(model, chunks=8, split=4, act_comp="topk:0.1", grad_comp="topk:0.2",
                       loss_fn=F.cross_entropy)
loss = pipe.forward_backward(x, y)

The public names stand in ``__init__.pyi``, once, for type checkers, editors and the loader: each is
imported when it is first asked for, so a module of one room loads those below it and no others.
"""

from importlib.util import find_spec
from pathlib import Path

import lazy_loader


def _check_stages() -> None:
    """Raises ImportError if `stages`, whose name is a common one, is not that beside this package.

    Somebody's own file or folder of that name would be imported in its place, and fail where
    nobody looks for the reason. It is found here, and not imported.
    """
    ours = Path(__file__).parent.with_name("stages")
    spec = find_spec("stages")
    if spec is None:
        raise ImportError(f"mpcomp needs its package stages at {ours}: install mpcomp again")
    # A folder without __init__.py has no origin.
    found = Path(spec.origin or next(iter(spec.submodule_search_locations or ())))
    if not (ours.exists() and found.parent.exists() and found.parent.samefile(ours)):
        raise ImportError(
            f"mpcomp cuts models with its own package stages, at {ours}, but `import stages` finds "
            f"{found}: rename that, or take its folder off sys.path"
        )


_check_stages()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
