"""An encoder and a decoder that reads it, as one line of blocks that can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stages.encoder_decoders.run import EncoderDecoderRun
from stages.encoders import Encoder
from stages.hints import listing
from stages.language_models.layout import Layout, unwrapped
from stages.stage import Piece, Run, ancestors

_WHOLE = "Train it whole in replicas with mpcomp.compress_gradients"


class EncoderDecoder(Encoder):
    """A model of transformers that reads one sequence and writes another."""

    def __init__(self, model: nn.Module) -> None:
        inner: Any = unwrapped(model)[1]
        if inner.get_output_embeddings() is None:
            raise ValueError(
                f"{type(inner).__name__} has an encoder and a decoder, but no head that gives "
                f"logits of tokens; such as BartForConditionalGeneration can be cut. {_WHOLE}"
            )
        for part in (inner.get_encoder(), inner.get_decoder()):
            if getattr(part, "layerdrop", 0):
                raise ValueError(
                    f"{type(part).__name__} leaves out blocks at random (layerdrop = "
                    f"{part.layerdrop}), and a cut needs its block: set layerdrop = 0 on "
                    "model.get_encoder() and model.get_decoder()"
                )
        super().__init__(model)

    def run(self, start: int, stop: int, *, first: bool, last: bool) -> Run:
        """The code of a stage with blocks ``start`` to ``stop`` - 1."""
        return EncoderDecoderRun(
            self.layout,
            start,
            stop,
            first,
            last,
            num_encoder=self._num_encoder,
            returned=(self._tried.returned[0], self._tried.returned[-1]),
            sounds=self._sounds,
        )

    def pieces(self, places: Sequence[int]) -> list[Piece]:
        """Cut at these increasing places; the encoder's last norm goes with the decoder."""
        pieces = super().pieces(places)
        first = self.layout.blocks[self._num_encoder]
        return [
            replace(
                piece,
                blocks=(*(self._between if first in piece.blocks else ()), *piece.blocks),
                tensors=(*piece.tensors, *(self._read_at_the_end if i == len(places) else ())),
            )
            for i, piece in enumerate(pieces)
        ]

    def _lay_out(self) -> Layout:
        """All that stands beside the blocks is before them until the model has run."""
        prefix, inner = unwrapped(self.model)
        parts: Any = inner
        lists = [self._block_list(part) for part in (parts.get_encoder(), parts.get_decoder())]
        blocks = [
            tuple(f"{name}.{child}" for child, _ in self.model.get_submodule(name).named_children())
            for name in lists
        ]
        self._num_encoder = len(blocks[0])
        self._between: tuple[str, ...] = ()
        #: Buffers of the model itself, such as a bias of the logits: the last stage reads them.
        self._read_at_the_end = tuple(
            f"{prefix}.{name}" if prefix else name for name in inner._buffers
        )
        inside = {path for name in lists for path in ancestors(name)}
        around = [p for p in ancestors(lists[0]) + ancestors(lists[1]) if p not in lists]
        beside = {
            path: any(True for _ in child.parameters())
            for parent in dict.fromkeys((prefix, *around))
            if parent == prefix or not prefix or parent.startswith(f"{prefix}.")
            for leaf, child in self.model.get_submodule(parent)._modules.items()
            if child is not None and (path := f"{parent}.{leaf}" if parent else leaf) not in inside
        }
        return Layout(
            prefix,
            blocks[0] + blocks[1],
            before=tuple(name for name, has_weights in beside.items() if has_weights),
            after=(),
            everywhere=tuple(name for name, has_weights in beside.items() if not has_weights),
        )

    def _block_list(self, part: Any) -> str:
        """Qualified name of the list of blocks of an encoder or a decoder."""
        lists = [c for c in part._modules.values() if isinstance(c, nn.ModuleList)]
        if len(lists) != 1:
            inner = type(unwrapped(self.model)[1]).__name__
            raise ValueError(
                f"cannot find the blocks of {inner}: looked for one nn.ModuleList in its "
                f"{type(part).__name__}, and there are {len(lists)}. {_WHOLE}"
            )
        names: dict[int, str] = {id(module): name for name, module in self.model.named_modules()}
        return names[id(lists[0])]

    def _run_once(self) -> Tensor:
        def gave(encoder: nn.Module, args: object, output: Any) -> None:
            self._tried.encoded.append(output[0])

        hook = self._inner.get_encoder().register_forward_hook(gave)
        try:
            return super()._run_once()
        finally:
            hook.remove()

    def _arrange(self, read: Sequence[str]) -> None:
        """Let modules stand where they are first called."""
        if read:
            raise ValueError(
                f"{type(self._inner).__name__} cannot be cut: {listing(read)} makes what other "
                "blocks read beside the activation, as T5's first block makes a bias of positions "
                f"for all, and no cut carries that. {_WHOLE}"
            )
        main = self._batch[self._inner.main_input_name]
        self._sounds: tuple[tuple[int, ...], int] | None = None
        if main.is_floating_point():
            self._sounds = tuple(main.shape[1:]), self._tried.encoded[0].shape[1]
        layout, (encoder, _) = self.layout, self.layout.lists
        count, all_blocks = self._num_encoder, len(self.layout.blocks)
        holder = encoder.rpartition(".")[0]
        at = {name: self._tried.called_at.get(name, 0) for name in layout.before}
        self._between = tuple(n for n in at if n.rpartition(".")[0] == holder and at[n] == count)
        after = tuple(n for n in at if at[n] == all_blocks)
        before = tuple(n for n in at if n not in (*after, *self._between))
        self.layout = replace(layout, before=before, after=after)
