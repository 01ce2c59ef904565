"""One direction of one cut: turns a tensor into a message and a message into a tensor.

A `Link` owns its method, the ends of it that live on this rank, the policy (when to send dense),
the meter and the randomness. Moving messages is left to an engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpcomp.adaptive.link_policy import LinkState
from mpcomp.adaptive.method import Adaptive
from mpcomp.compressors.base import Compressor, Selecting
from mpcomp.compressors.identity import Identity, or_dense
from mpcomp.compressors.same_indices import SameIndices
from mpcomp.core.checks import check_tensor, nonfinite_error
from mpcomp.core.message import COMPRESSED, DENSE, Header, frame, message_bytes, unframe
from mpcomp.core.packing import Payload
from mpcomp.core.padding import blanked, padded_positions
from mpcomp.core.randomness import generator_for
from mpcomp.core.step import Probe, SampleIds, Step, Visit
from mpcomp.core.tensor_meta import TensorMeta
from mpcomp.core.traffic import Meter, Traffic
from mpcomp.feedback.base import AdaptableSender, Feedback, Receiver, Sender
from mpcomp.feedback.ends import Ends
from mpcomp.links.adaptation import state_of

__all__ = ["ACT", "GRAD", "Link", "Method"]

Method = Compressor | Feedback | SameIndices | Adaptive

ACT, GRAD = "act", "grad"


class Link:
    """One direction of one cut.

    Args:
        method: what is done to the tensor; SameIndices is resolved by the boundary.
        boundary: number of the cut.
        direction: "act" or "grad", or that of a tie (`mpcomp.links.tied_weights`), which carries
            gradients too.
        seed: of the run; random choices follow from (seed, replica, boundary, direction, step,
            microbatch).
        replica: number of the replica.
        warmup_steps: training steps that go dense at first.
        ends: the stages that send and receive; those on both sides of the cut by default.
        name: for messages; by default of the form ``boundary 0 act``.
    """

    def __init__(
        self,
        method: Method,
        *,
        boundary: int,
        direction: str,
        seed: int = 0,
        replica: int = 0,
        warmup_steps: int = 0,
        ends: tuple[int, int] | None = None,
        name: str | None = None,
    ) -> None:
        self.method = method
        self.boundary = boundary
        self.direction = direction
        self.name = name or f"boundary {boundary} {direction}"
        across = (boundary, boundary + 1)
        self.sender_stage, self.receiver_stage = ends or (
            across if direction == ACT else across[::-1]
        )
        self.warmup_steps = warmup_steps
        self.meter = Meter()
        #: Whether messages leave the rank; if not they are coded all the same, but not counted.
        self.on_wire = True
        #: Whether NaN and Inf are noted for the end of the step also where an error could be
        #: raised at once: with several ranks, all of them must raise it.
        self.defers_nonfinite = False
        self._seed = (seed, replica, boundary, direction)
        inner = method.inner if isinstance(method, Adaptive) else method
        #: The feedback method, also of an adaptive link, whose ratio then is not the present one.
        self.feedback = inner if isinstance(inner, Feedback) else None
        #: What an adaptive link has come to; None of others.
        self.adaptive: LinkState | None = state_of(method) if isinstance(method, Adaptive) else None
        self._ends = Ends(self.feedback) if self.feedback is not None else None
        self._nonfinite: list[tuple[Traffic, Tensor]] = []

    @property
    def ends(self) -> dict[str, Sender | Receiver]:
        """The ends made so far, by role; a method that remembers nothing has none."""
        return self._ends.by_role if self._ends is not None else {}

    def check_step(self, step: Step, sizes: Sequence[int]) -> None:
        """Raises what a visit of this step would raise, before anything has run.

        Args:
            step: the step to come.
            sizes: rows of its microbatches.

        Raises:
            ValueError: the method needs sample ids of another form, or a learning rate.
        """
        if step.train and self.feedback is not None:
            for microbatch in range(len(sizes)):
                self.feedback.check_visit(self._visit(step, microbatch), sizes[microbatch])

    def encode(
        self, x: Tensor, step: Step, microbatch: int, positions: Tensor | None = None
    ) -> Tensor:
        """The message for ``x``: uint8 [n] on its device.

        A compressed message carries zeros where the step's batch is padded.

        Args:
            x: activation or gradient of one microbatch.
            step: the step it belongs to.
            microbatch: number of the microbatch.
            positions: for SameIndices, the elements that the activation's message carried.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: an empty tensor, or sample ids that the method needs are missing.
            FloatingPointError: NaN or Inf (in a gradient only without a loss scaler).
        """
        begin = time.perf_counter()
        check_tensor(x, self.name)
        status = self._check_finite(x, step)
        meta = TensorMeta.of(x)
        visit = self._visit(step, microbatch)
        kind, check = COMPRESSED, 0
        coder = self._coder(meta, step, positions)
        x = blanked(x, self._padded(coder, meta, visit, x.device))
        if isinstance(coder, Compressor):
            payload = coder.compress(x, visit.draw(""))
            kind = DENSE if isinstance(coder, Identity) else COMPRESSED
            if kind == DENSE and self._ends is not None and step.train:
                self._ends.sender(meta, x.device).observe_dense(x, visit)
        else:
            assert self._ends is not None
            sender = self._ends.sender(meta, x.device)
            check = sender.check(visit, meta.num_rows)
            payload = sender.encode(x, visit)
        self._measure(x, meta, step, visit)
        message = frame(Header(kind, 0, check, step.index, self._cf(coder, step)), payload)
        if status is not None:
            message[2] = status
        if self.adaptive is not None and step.train and self.enabled(step):
            self.adaptive.note_message(message.numel(), meta)
        traffic = self._traffic(step)
        if self.on_wire:
            traffic.count(message.numel(), meta.dense_bytes)
        traffic.seconds += time.perf_counter() - begin
        return message

    def decode(
        self,
        message: Tensor,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The tensor like ``meta`` that a message says; all NaN if the sender saw NaN or Inf.

        Unless the message is dense it is exactly zero where the step's batch is padded.

        Raises:
            RuntimeError: the message is not one that this end expects.
        """
        begin = time.perf_counter()
        visit = self._visit(step, microbatch)
        coder = self._coder(meta, step, positions)
        payload = self._payload(message, meta, step, visit, coder)
        receiver = (
            self._ends.receiver(meta, message.device)
            if self._ends is not None and step.train
            else None
        )
        if isinstance(coder, Compressor):
            x = coder.decompress(payload, meta, visit.draw(""))
            if isinstance(coder, Identity) and receiver is not None:
                receiver.observe_dense(x, visit)
        else:
            assert receiver is not None
            x = receiver.decode(payload, meta, visit)
        x = blanked(x, self._padded(coder, meta, visit, x.device))
        if message.device.type != "cpu":
            x.masked_fill_(message[2].bool(), torch.nan)
        elif message[2]:
            x.fill_(torch.nan)
        self._traffic(step).seconds += time.perf_counter() - begin
        return x

    def compare(
        self, x: Tensor, arrived: Tensor, step: Step, microbatch: int | None = None
    ) -> None:
        """Meters the fidelity of what arrived for ``x``; dense messages arrive as they are.

        Only positions that count are compared, given the number of the microbatch.
        """
        if self.enabled(step) and not isinstance(self.method, Identity):
            meta = TensorMeta.of(x)  # memory order, which spares a transposition
            arrived = meta.flatten(arrived.to(x.device))
            valid = None if microbatch is None else step.valid_of(microbatch)
            padded = padded_positions(valid, meta, x.device)
            meant, arrived = blanked(meta.flatten(x), padded), blanked(arrived, padded)
            self._traffic(step).compare(meant, arrived)

    def compare_sent(
        self,
        x: Tensor,
        message: Tensor,
        step: Step,
        microbatch: int,
        positions: Tensor | None = None,
    ) -> None:
        """As `compare`, where ``x`` was just encoded here but arrives elsewhere."""
        if not self.enabled(step) or isinstance(self.method, Identity):
            return
        self.compare(x, self.arrived(x, message, step, microbatch, positions), step, microbatch)

    def arrived(
        self,
        x: Tensor,
        message: Tensor,
        step: Step,
        microbatch: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """What the other end makes of the message that was just encoded here for ``x``."""
        meta = TensorMeta.of(x)
        visit = self._visit(step, microbatch)
        coder = self._coder(meta, step, positions)
        payload = unframe(message, self._layout(coder, meta, visit))
        if isinstance(coder, Compressor):
            return coder.decompress(payload, meta, visit.draw(""))
        assert self._ends is not None
        return self._ends.sender(meta, x.device).arrived(payload, meta, visit)

    def message_bytes(
        self,
        meta: TensorMeta,
        step: Step,
        microbatch: int,
        device: torch.device,
        positions: Tensor | None = None,
    ) -> int:
        """Length of the message for a tensor like ``meta``, known before there is one.

        Args:
            meta: what will be received.
            step: the step it belongs to.
            microbatch: number of the microbatch.
            device: where it will be received.
            positions: for SameIndices, as in `encode`.
        """
        coder = self._coder(meta, step, positions)
        if isinstance(coder, Feedback):
            assert self._ends is not None
            self._ends.receiver(meta, device)  # holds the flags that the layout depends on
        return message_bytes(self._layout(coder, meta, self._visit(step, microbatch)))

    def carried(
        self, role: str, message: Tensor, meta: TensorMeta, step: Step, microbatch: int
    ) -> Tensor | None:
        """Positions of the elements in a message, for SameIndices; None if it is dense."""
        visit = self._visit(step, microbatch)
        coder = self._coder(meta, step, None)
        payload = unframe(message, self._layout(coder, meta, visit))
        if isinstance(coder, Selecting):
            return coder.indices(payload, meta, visit.draw(""))
        if isinstance(coder, Compressor):
            return None
        return self.ends[role].positions(payload, meta, visit)

    def found_nonfinite(self, train: bool = True) -> bool:
        """Whether training (or evaluation) saw a non-finite tensor here since the last call.

        On an accelerator this waits for it.
        """
        noted: list[tuple[Traffic, Tensor]] = []
        kept: list[tuple[Traffic, Tensor]] = []
        for note in self._nonfinite:
            (noted if (note[0] is self.meter.train) == train else kept).append(note)
        self._nonfinite = kept
        if not noted:
            return False
        flags = torch.stack([flag for _, flag in noted]).tolist()
        for (traffic, _), flag in zip(noted, flags, strict=True):
            traffic.nonfinite += flag
        return any(flags)

    def prefetch(self, ids: Sequence[SampleIds]) -> None:
        """Begins to read what the ends here will need for a step with these ids.

        Args:
            ids: of each microbatch.

        Raises:
            OSError: reading ahead failed since the last call.
        """
        if self._ends is not None:
            self._ends.prefetch(ids)

    def commit(self) -> None:
        """Stores what the ends have noted."""
        if self._ends is not None:
            self._ends.commit()

    def discard(self) -> None:
        """Forgets what the ends have noted."""
        if self._ends is not None:
            self._ends.discard()

    # -- which method speaks ------------------------------------------------------------------

    def enabled(self, step: Step) -> bool:
        """Whether this link compresses in a step; an adaptive one may send dense all the same."""
        if self._probed(step):
            return True
        if step.probe is not None and step.probe.alone:
            return False
        on = step.compress_act if self.direction == ACT else step.compress_grad
        return on and not (step.train and step.index < self.warmup_steps)

    def _traffic(self, step: Step) -> Traffic:
        if step.probe is not None:
            return self.meter.probe
        return self.meter.of(step.train, self.enabled(step))

    def _present(self, step: Step) -> Compressor | Feedback | SameIndices:
        """The method; of an adaptive link with the ratio of this step."""
        if not isinstance(self.method, Adaptive):
            return self.method
        if (probe := self._probed(step)) is not None:
            return self.method.compressor(probe.cf)
        assert self.adaptive is not None
        coder = self.adaptive.coder
        if isinstance(coder, Feedback):
            assert self._ends is not None
            self._ends.use(coder)  # they know no step, and are asked nothing before this
        return coder

    def _cf(self, coder: Compressor | Feedback, step: Step) -> float:
        """The header's: of an adaptive link what it codes with."""
        if self.adaptive is None or isinstance(coder, Identity):
            return 0.0
        probe = self._probed(step)
        return self.adaptive.cf if probe is None else probe.cf

    def _probed(self, step: Step) -> Probe | None:
        """What a pass that measures this link by its losses tells it."""
        return step.probe if step.probe is not None and step.probe.link == self.name else None

    def _measure(self, x: Tensor, meta: TensorMeta, step: Step, visit: Visit) -> None:
        """Measures what compression would leave out of ``x``, in one microbatch of a step."""
        state = self.adaptive
        if state is None or not (step.train and self.enabled(step) and state.measures_energies):
            return
        if visit.microbatch != step.index % step.num_microbatches:
            return
        padded = padded_positions(visit.valid, meta, x.device)
        wanted = against = blanked(x.detach(), padded)
        if self._ends is not None:
            sender = self._ends.sender(meta, x.device)
            assert isinstance(sender, AdaptableSender)
            wanted, against = sender.measured(wanted, visit)
        state.note_energies(wanted, against, padded, visit.draw)

    def _coder(
        self, meta: TensorMeta, step: Step, positions: Tensor | None
    ) -> Compressor | Feedback:
        """What codes this message: a compressor, or the feedback method's ends."""
        if not self.enabled(step):
            return Identity()
        method = self._present(step)
        if isinstance(method, SameIndices):
            return Identity() if positions is None else or_dense(method.at(positions), meta)
        if isinstance(method, Feedback):
            if step.train:
                return method
            return Identity() if method.eval == "raw" else or_dense(method.inner, meta)
        return or_dense(method, meta)

    def _padded(
        self, coder: Compressor | Feedback, meta: TensorMeta, visit: Visit, device: torch.device
    ) -> Tensor | None:
        """Where the message says nothing; None for a dense one, which carries all there is."""
        return None if isinstance(coder, Identity) else padded_positions(visit.valid, meta, device)

    def _layout(
        self, coder: Compressor | Feedback, meta: TensorMeta, visit: Visit
    ) -> tuple[TensorMeta, ...]:
        if isinstance(coder, Compressor):
            return coder.layout(meta)
        end = next(iter(self.ends.values()))  # both ends of this rank hold the same flags
        return end.layout(meta, visit)

    def _visit(self, step: Step, microbatch: int) -> Visit:
        kind = "train" if step.train else "eval"
        again = ("call", step.call) if step.call else ()
        seed = (*self._seed, kind, step.index, microbatch, *again)
        unit = 1.0 if self.direction == ACT else step.loss_scale
        if self.feedback is not None and self.feedback.lr_scaled and step.train:
            if not step.lr:
                raise ValueError(
                    f"{self.method} keeps its residual in units of the learning rate, which this "
                    f"pipeline does not know (lr={step.lr}): call pipe.follow_lr(optimizer)"
                )
            unit /= step.lr
        return Visit(
            step.index,
            microbatch,
            lambda part: generator_for(*seed, part),
            step.ids_of(microbatch),
            unit,
            step.valid_of(microbatch),
        )

    # -- checks -------------------------------------------------------------------------------

    def _check_finite(self, x: Tensor, step: Step) -> Tensor | None:
        """The status byte as a 0-d tensor, or None for an all-clear on the CPU."""
        if step.probe is not None:
            return None  # the loss will say it
        low, high = x.detach().aminmax()  # NaN passes through both
        nonfinite = ~(low.isfinite() & high.isfinite())
        if x.device.type == "cpu":
            if not nonfinite:
                return None
            if not self.defers_nonfinite and (self.direction == ACT or not step.scaled):
                self._traffic(step).nonfinite += 1
                raise nonfinite_error(self.name, step.index)
        self._nonfinite.append((self._traffic(step), nonfinite))
        return nonfinite.to(torch.uint8)

    def _payload(
        self,
        message: Tensor,
        meta: TensorMeta,
        step: Step,
        visit: Visit,
        coder: Compressor | Feedback,
    ) -> Payload:
        receiver = None
        if isinstance(coder, Feedback):
            assert self._ends is not None
            receiver = self._ends.receiver(meta, message.device)
        payload = unframe(message, self._layout(coder, meta, visit))
        if message.device.type == "cpu":  # elsewhere reading the header would stall the device
            kind = DENSE if isinstance(coder, Identity) else COMPRESSED
            check = receiver.check(visit, meta.num_rows) if receiver is not None else 0
            got = Header.of(message)
            number, cf = step.index & 0xFFFFFFFF, self._cf(coder, step)
            expected = Header(kind, got.status, check, number, cf)
            if got != expected:
                raise RuntimeError(
                    f"{self.name}, step {step.index}, microbatch {visit.microbatch}: the two ends "
                    f"disagree (message says {got}, this end expects {expected})"
                )
        return payload

    # -- persistence --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Stored rows of each end, the sample shape they belong to, and what is adapted."""
        state = self._ends.state_dict() if self._ends is not None else {}
        if self.adaptive is not None:
            state["adaptive"] = self.adaptive.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], device: dict[str, torch.device]) -> None:
        """Restores `state_dict`; ``device`` says where each role's end lives."""
        rows = {name: value for name, value in state.items() if name != "adaptive"}
        if self._ends is not None:
            self._ends.load_state_dict(rows, device)
        if isinstance(self.method, Adaptive):
            self.adaptive = state_of(self.method)
            if "adaptive" in state:
                self.adaptive.load_state_dict(state["adaptive"])
