"""torch's PipelineStage with compressed messages: every private override stands in this file.

torch's schedules call a stage to run one microbatch forward or backward, and beside that to ask for
send and receive operations. Here a stage sends and receives by itself, and offers no operations::

    run_ahead             the first stage's first microbatch, while ranks agree on the step
    post                  posts the receives of all activations to come
    forward_one_chunk     waits for the activation, decodes, runs; encodes, sends, and posts the
                          receive of the gradient that will come back
    backward_one_chunk    waits for the gradient, decodes, runs; encodes and sends

Where no gradient flows back to a stage's input, the stage says so in place of a message. The stage
before then leaves the microbatch's backward out, so `grad` stays None as in one process.

torch's own inference of shapes must never run: it runs stages in training mode on uninitialised
memory, which ends in BatchNorm's statistics, and it unpickles what comes over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.context import Step, TensorMeta
from mpcomp.core.microbatch import map_tensors
from mpcomp.core.torch_forwards import drop_forward, forward_of, keep_forward
from mpcomp.engines.background import Background
from mpcomp.engines.graph import depends
from mpcomp.engines.saved_bytes import SavedBytes
from mpcomp.engines.stage_runner import Autocast, StageRunner
from mpcomp.engines.updates import StashedWeights, Updates, lag_of, late_of
from mpcomp.links.boundary import ConnectedBoundary, Crossing, Encoded

__all__ = ["CutStage", "run_schedule"]


class _Forward(NamedTuple):
    """A microbatch that has run forward, and whose message has not left.

    Attributes:
        output: of the stage, or the error of a microbatch that ran ahead.
        received: the stage's input, of all but the first.
        encoded: the message of the output; None if there is none yet, or of the last stage.
    """

    output: Tensor | Exception
    received: list[Tensor]
    encoded: Encoded | None


class CutStage(PipelineStage):
    """One stage on this rank.

    Args:
        runner: the stage and how to run it.
        num_stages: of the pipeline.
        mesh: the connected ranks; told where this one is.
        before: the cut before this stage, None for the first.
        after: the cut after it, None for the last.
        background: codes messages of training steps beside the stage; None to code in turn.
    """

    def __init__(
        self,
        runner: StageRunner,
        num_stages: int,
        mesh: ProcessMesh,
        *,
        before: ConnectedBoundary | None,
        after: ConnectedBoundary | None,
        background: Background | None = None,
    ) -> None:
        assert isinstance(runner.stage, nn.Module)
        super().__init__(
            runner.stage, runner.index, num_stages, runner.device, group=mesh.pipe_group
        )
        self._runner = runner
        self._before = before
        self._after = after
        self._mesh = mesh
        # A receive that waits for its turn would have to be begun in the order of all others.
        ways = [way for cut in (before, after) if cut is not None for way in (cut.act, cut.grad)]
        ahead = all(way.channel.posts_ahead for way in ways)
        self._background = background if ahead else None
        #: Counts what a microbatch keeps for backward, while somebody wants to know.
        self.saved: SavedBytes | None = None
        self._runtime_validate = False  # with torch's debug level; it knows of no messages
        if hasattr(self, "_stage_meta"):  # from torch 2.13 on; its length counts the inputs
            self._stage_meta.inputs = (None,)  # type: ignore[assignment]

    @property
    def has_trainable(self) -> bool:
        """Whether any of its parameters requires a gradient at the moment."""
        return self._runner.has_trainable

    @property
    def stashed(self) -> StashedWeights | None:
        """Its weights in a step in which they change; None in other steps."""
        return self._runner.stashed

    @property
    def forward_s(self) -> float:
        """Seconds of its forward passes with gradients so far."""
        return self._runner.forward_s

    def begin(
        self,
        step: Step,
        metas: Sequence[Sequence[TensorMeta]],
        autocast: Autocast,
        updates: Updates | None = None,
    ) -> None:
        """Prepares for the microbatches of a step, or of one pass of evaluation.

        Args:
            step: the step.
            metas: per microbatch, what crosses each cut.
            autocast: of the caller.
            updates: of weights within the step, if there are any.
        """
        self._step = step
        # With one microbatch nothing runs meanwhile; outside of training a stage may write again
        # to what it gave (CUDA graphs do).
        self._beside = self._background if step.train and len(metas) > 1 else None
        #: Microbatches whose backward has left nothing for later.
        self._ended: set[int] = set()
        self._ahead: _Forward | None = None
        self._metas = metas
        self._autocast = autocast
        self.has_backward = step.train
        if updates is not None:
            together = self._runner.stage.together
            lag = lag_of(self.stage_index, self.num_stages, together=together)
            late = late_of(self.stage_index, self.num_stages, together=together)
            # The schedule runs forwards as late as that: those to come want the newest weights.
            self._runner.stashed = StashedWeights(self.submod, updates, lag, kept=0, late=late)
        self.chunks = len(metas)
        self.clear_runtime_states()

    def post(self, trained: int = 0) -> None:
        """Posts the receives of all activations to come; nothing is sent before this.

        All ranks have met since the last step, so what they sent in it has arrived.

        Args:
            trained: the first stage with something to train; no gradient goes further back.
        """
        self._trained = trained
        if self._after is not None:
            self._after.act.channel.release()
        if self._before is not None:
            self._before.grad.channel.release()
            cut = self.stage_index - 1
            act = self._before.act
            for i, at_cuts in enumerate(self._metas):
                act.post(at_cuts[cut], self._step, i)
                self._expect(act, act.receive, at_cuts[cut], i, "forward")

    def finish(self) -> None:
        """Lets go of what the step left behind, but for messages: they may be on their way yet."""
        self.clear_runtime_states()
        self._ahead = None
        self._runner.stashed = None

    def close(self) -> None:
        """Lets go of all connections."""
        self.group = None
        self._before = self._after = None

    # -- one microbatch -------------------------------------------------------------------------

    def infer(self, microbatch: int, batch: Any) -> Tensor:
        """Runs forward alone. ``batch`` is what this stage takes of the microbatch."""
        self._at(microbatch, "forward")
        value, beside = self._inputs(microbatch, batch)
        output = self._run(value, beside, microbatch)
        self._hand_over(microbatch, output)
        return output

    def run_ahead(self, batch: Any) -> Callable[[], None]:
        """Runs the first microbatch and encodes its message, which leaves when the schedule asks.

        Of the first stage, which needs no message for that.

        Args:
            batch: what this stage takes of the microbatch.

        Returns:
            A function that puts back what was changed by it.
        """
        ways = [self._runner.way_back()]
        if self._after is not None:
            ways.append(self._after.boundary.act.nonfinite.way_back())
        try:
            output, received = self._forward(0, batch)
            self._ahead = _Forward(output, received, self._encoded(0, output))
        except Exception as error:  # is raised once ranks agree, as they may not
            self._ahead = _Forward(error, [], None)

        def back() -> None:
            self.finish()
            for each in ways:
                each()

        return back

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """Runs a microbatch forward; sends what follows from it. Called by the schedule."""
        self._at(fwd_chunk_id, "forward")
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = _Forward(*self._forward(fwd_chunk_id, args[0][self.stage_index]), None)
        output, received, encoded = ahead
        if isinstance(output, Exception):
            raise output
        keep_forward(self, fwd_chunk_id, (output,), received)
        self._hand_over(fwd_chunk_id, output, encoded)
        return output

    def _forward(self, microbatch: int, batch: Any) -> tuple[Tensor, list[Tensor]]:
        """Output and input of a microbatch; ``batch`` is what this stage takes of it."""
        value, beside = self._inputs(microbatch, batch)
        received: list[Tensor] = []
        if self._before is not None:
            received = [value]
        # The first is among the largest. A stage's first call may copy its input: better the next.
        counted = int(self._metas[0] in self._metas[1:2])
        saved = self.saved if microbatch == counted else None
        anyway: list[Tensor] = list(self.submod.parameters())
        # The batch is there for the whole step.
        map_tensors(beside if received else value, anyway.append)
        with saved.counting(anyway) if saved else nullcontext():
            output = self._run(value, beside, microbatch)
        if saved is not None:
            for kept in (*received, output):
                saved.add(kept)
        return output, received

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs a microbatch backward; sends the gradient of its input. Called by the schedule."""
        self._at(bwd_chunk_id, "backward")
        if self._trained > self.stage_index:
            drop_forward(self, bwd_chunk_id)
            self._ended.add(bwd_chunk_id)
            return
        self._received = None if self._after is None else self._receive_gradient(bwd_chunk_id)
        grad = None
        if self._after is not None and self._received is None:
            drop_forward(self, bwd_chunk_id)
            self._ended.add(bwd_chunk_id)
        else:
            grad = self._backward(bwd_chunk_id, loss, full_backward)
        if self._before is not None and self._trained < self.stage_index:
            meta = self._metas[bwd_chunk_id][self.stage_index - 1]
            way, step = self._before.grad, self._step
            send = partial(way.send, grad, meta, step, bwd_chunk_id)
            self._code(way, bwd_chunk_id, "backward", send, grad)

    def _backward(self, microbatch: int, loss: Tensor | None, full: bool) -> Tensor | None:
        """Runs backward; the gradient of the stage's input, if there is one."""
        (output,), inputs = forward_of(self, microbatch)
        if not full and self._before is not None:
            end = output if loss is None else loss
            if not depends(end, inputs[0]):
                # torch divides a backward at the input, and would find no weights behind it.
                self._ended.add(microbatch)
                full = True
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)  # torch itself does so before 2.15
        trace = self._step.trace
        if trace is not None:
            trace.open("backward", self.stage_index, microbatch)
        with _own_errors():
            super().backward_one_chunk(microbatch, loss, full, last_backward=False)
        if trace is not None:
            trace.close()
        grads: tuple[Tensor | None, ...] = self.bwd_cache.pop(microbatch)
        return grads[0] if grads else None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of backward that a split left for later. Called by the schedule."""
        if bwd_chunk_id in self._ended:
            return
        self._at(bwd_chunk_id, "backward of the weights")
        at = self.stage_index, bwd_chunk_id
        with _own_errors(), self._step.during("weights", *at):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=False)

    def update(self, updates: Updates, microbatch: int) -> None:
        """Changes the weights behind the backward of a microbatch. Called by the schedule."""
        self._at(microbatch, "update")
        with self._step.during("update", self.stage_index, microbatch):
            updates.function()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass  # the engine does, once a step and after the sum over tied weights

    def start_gradient_reduction(self) -> None:
        pass  # likewise; from torch 2.15 on

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        pass

    def taken_from(self, batch: Any) -> Any:  # torch's own stages have an attribute `inputs`
        """The part of a microbatch that this stage takes, on its device."""
        return self._runner.inputs(batch)

    def _inputs(self, microbatch: int, taken: Any) -> tuple[Any, dict[str, Any]]:
        """Arguments of the stage: the batch, or the activation and what goes beside it."""
        if self._before is None:
            return taken, {}
        return self._receive(microbatch), taken

    def _run(self, value: Any, beside: dict[str, Any], microbatch: int) -> Tensor:
        number = self._number(microbatch)
        with self._step.during("forward", self.stage_index, microbatch):
            return self._runner(value, beside, self._step.index, number, self._autocast)

    def _receive(self, microbatch: int) -> Tensor:
        assert self._before is not None
        meta = self._metas[microbatch][self.stage_index - 1]
        act = self._before.act
        value: Tensor
        value, constant = self._taken(act, act.receive, meta, microbatch)
        trains = self._step.train and self._trained < self.stage_index
        return value.requires_grad_(trains and not constant)

    def _receive_gradient(self, microbatch: int) -> Tensor | None:
        assert self._after is not None
        meta = self._metas[microbatch][self.stage_index]
        grad = self._after.grad
        value: Tensor | None = self._taken(grad, grad.receive_any, meta, microbatch)
        return value

    def _encoded(self, microbatch: int, output: Tensor) -> Encoded | None:
        """The message of an output; None of the last stage's."""
        if self._after is None:
            return None
        meta = self._meta_of(output, microbatch)
        return self._after.act.encode(output.detach(), meta, self._step, microbatch)

    def _meta_of(self, output: Tensor, microbatch: int) -> TensorMeta:
        """The shape and dtype of an output, as both ends know them without data; checked."""
        meta = self._metas[microbatch][self.stage_index]
        if tuple(output.shape) != meta.shape or output.dtype != meta.dtype:
            raise ValueError(
                f"stage {self.stage_index} gave {list(output.shape)} {output.dtype}, but without "
                f"data {list(meta.shape)} {meta.dtype}: its output's shape must not depend on the "
                "values of tensors"
            )
        return meta

    def _hand_over(self, microbatch: int, output: Tensor, encoded: Encoded | None = None) -> None:
        """Sends the message of an output, and posts the receive of what will come back."""
        if self._after is None:
            return
        act, grad, step = self._after.act, self._after.grad, self._step
        meta, x = self._meta_of(output, microbatch), output.detach()
        trains = step.train and self._trained <= self.stage_index
        constant = trains and not output.requires_grad

        def send() -> None:
            message = encoded or act.encode(x, meta, step, microbatch)
            act.send_encoded(message, constant=constant)
            if trains:
                grad.post(meta, step, microbatch)
                self._expect(grad, grad.receive_any, meta, microbatch, "backward")

        self._code(act, microbatch, "forward", send, x)

    # -- in the background, or in turn ----------------------------------------------------------

    def _code(
        self, way: Crossing, microbatch: int, what: str, send: Callable[[], None], x: Tensor | None
    ) -> None:
        """Encodes and sends a message of ``x``, by calling ``send``."""
        if self._beside is not None:
            self._beside.give(way, self._doing(microbatch, what), send, x)
        else:
            send()

    def _expect(
        self,
        way: Crossing,
        receive: Callable[..., Any],
        meta: TensorMeta,
        microbatch: int,
        what: str,
    ) -> None:
        """Begins to wait for a message that was posted, to be decoded by ``receive``."""
        if self._beside is not None:
            decode = partial(receive, meta, self._step, microbatch, arrived=True)
            self._beside.expect(way, microbatch, self._doing(microbatch, what), decode)

    def _taken(
        self, way: Crossing, receive: Callable[..., Any], meta: TensorMeta, microbatch: int
    ) -> Any:
        """The result of ``receive``, or of a thread that has called it beside this one."""
        if self._beside is None:
            return receive(meta, self._step, microbatch)
        link = way.link
        with self._step.during("receive", link.receiver_stage, microbatch, link.name):
            return self._beside.take(way, microbatch)

    def _doing(self, microbatch: int, what: str) -> str:
        return f"stage {self.stage_index}, microbatch {microbatch}, {what}"

    def _number(self, microbatch: int) -> int:
        """Among those of all replicas, as one process would count them: each its own dropout."""
        return self._mesh.replica * len(self._metas) + microbatch

    def _at(self, microbatch: int, what: str) -> None:
        self._mesh.where = self._doing(microbatch, what)

    # -- what torch must not do -----------------------------------------------------------------

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        assert self._received is not None
        received, self._received = self._received, None
        return (received,)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        pass  # the stage before has sent it

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        return ()  # it has been sent

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        pass

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch would infer shapes")

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch would infer shapes")


def run_schedule(schedule: Any, microbatches: Sequence[Any], targets: Sequence[Any]) -> None:
    """Runs one step of a torch schedule on microbatches of any sizes.

    `step` of torch's schedules cuts a batch itself, evenly, and infers shapes.
    """
    # Flags of schedules with one stage a rank, and with several: nothing is left to initialise.
    for flag in (
        "_stage_forward_initialized",
        "_stage_backward_initialized",
        "_stages_forward_initialized",
        "_stages_backward_initialized",
    ):
        if hasattr(schedule, flag):
            setattr(schedule, flag, True)
    schedule._step_microbatches(
        [(batch,) for batch in microbatches],
        [{} for _ in microbatches],
        list(enumerate(targets)),
        return_outputs=False,
    )


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors as they were raised: torch wraps those of a backward in a list of its tensors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
