"""The key-value cache of one stage under generation."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache


class StageCache(DynamicCache):
    """A cache for the blocks of one stage, which know themselves by their number in the model.

    What asks for the cache's length asks its first layer, so a cache with empty layers in front
    would make a wrong mask, and left-padded batches would decode wrongly without an error.

    Args:
        config: of a model with the stage's blocks alone.
        first_block: the number of the first of them.
    """

    def __init__(self, config: Any, first_block: int) -> None:
        super().__init__(config=config)
        self._first_block = first_block

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a block; return all of them."""
        own = layer_idx - self._first_block
        keys, values = super().update(key_states, value_states, own, *args, **kwargs)
        return keys, values
