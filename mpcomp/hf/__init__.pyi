"""The public names of `mpcomp.hf`, which ``__init__.py`` loads lazily."""

from .pipeline import CompressedPipelineStage as CompressedPipelineStage
from .pipeline import compress_pipeline as compress_pipeline
from .trainer import PipelineAccelerator as PipelineAccelerator
from .trainer import PipelineTrainer as PipelineTrainer
