"""The caches of all stages of this process for one batch under generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.stage import StageState


class StageCaches(StageState):
    """The keys and values of one batch under generation: each stage here has its own cache."""

    def __init__(self) -> None:
        self._caches: dict[int, Any] = {}

    def shaping(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens of this call; the mask is of all tokens so far, and longer in each call."""
        return {"input_ids": batch["input_ids"]}

    @property
    def length(self) -> int:
        """Number of tokens that the stages here have seen."""
        return max((cache.get_seq_length() for cache in self._caches.values()), default=0)

    def of(self, stage: int, first_block: int, config: Any) -> Any:
        """The cache of a stage, made when it is first asked for."""
        from stages.language_models.cache import StageCache

        if stage not in self._caches:
            self._caches[stage] = StageCache(config, first_block)
        return self._caches[stage]
