"""Wrappers round a pipeline that take the ranks for copies of one model."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

__all__ = ["WRAPPED", "refuse_within_ddp"]

#: What is wrong with DistributedDataParallel round a pipeline, and what to do.
WRAPPED = (
    "a pipeline in DistributedDataParallel, which accelerate's prepare and Lightning's strategy "
    "'ddp' wrap models in: ranks hold stages, not copies, of the model. Leave the pipeline out of "
    "prepare and setup (prepare the optimizer alone: every rank sees the same batches), give "
    "Lightning's Trainer devices=1 and use_distributed_sampler=False, take "
    "mpcomp.hf.PipelineTrainer for transformers, and mpcomp.pipeline(..., replicas=n) for copies"
)


def refuse_within_ddp() -> None:
    """Refuses to train in a `DistributedDataParallel` that holds the pipeline within a module.

    It asks only the outermost module whether it may be wrapped. Of stages with unlike parameters
    it then says that their number differs; those of like stages it would average, without a word.

    Raises:
        TypeError: one is running its forward pass.
    """
    if DistributedDataParallel._active_ddp_module is not None:
        raise TypeError(WRAPPED)
