"""`compress_gradients`: compressed gradients for models in torch's DDP or FSDP2."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types.
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mpcomp.comm.handshake import check_alike, fingerprint
from mpcomp.compressors import Compressor
from mpcomp.core.embeddings import check_dense_gradients
from mpcomp.core.spec import shown
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.fsdp import Shards
from mpcomp.data_parallel.local_exchange import LocalExchange
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of
from mpcomp.data_parallel.network import ReplicaNetwork
from mpcomp.data_parallel.sharded import ShardedExchange, ShardedParameter

__all__ = ["CompressedGradients", "ShardedGradients", "compress_gradients"]

_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CompressedGradients:
    """The state of a model's compressed gradients on this rank; see `compress_gradients`.

    Args:
        exchange: what does the work.
        scaler: the loss scaler in use, if any.

    Attributes:
        exchange: as given.
    """

    def __init__(self, exchange: Exchange, scaler: torch.amp.GradScaler | None) -> None:
        self.exchange = exchange
        self._scaler = scaler
        self._lr_of: torch.optim.Optimizer | None = None

    def begin(self, *, compress: bool = True) -> None:
        """Begins a step with the loss scale and the learning rate of the moment."""
        enabled = self._scaler is not None and self._scaler.is_enabled()
        scale = self._scaler.get_scale() if self._scaler is not None and enabled else 1.0
        lr = float(self._lr_of.param_groups[0]["lr"]) if self._lr_of is not None else None
        self.exchange.begin(loss_scale=scale, lr=lr, compress=compress)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Names the optimizer that steps by the gradients, for the methods that must know it.

        Some follow its (first group's) rate; `LocalSGD` acts after its steps.

        Raises:
            ValueError: the optimizer has momentum, and so has the method; or it has none of the
                parameters that `LocalSGD` is to average.
        """
        self.exchange.follow(optimizer)
        self._lr_of = optimizer

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each of the last 1,000 steps: bytes, floats, seconds, the method's state."""
        return list(self.exchange.history)

    def report(self) -> dict[str, Any]:
        """Totals of this replica: bytes, floats, ratio, seconds, and what the method is at."""
        return self.exchange.report()

    def state_dict(self) -> dict[str, Any]:
        """All that this replica needs to go on exactly: ``tensors``, and ``rest`` for JSON."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave on the same replica, of as many.

        Raises:
            ValueError: it was given by another method.
        """
        self.exchange.load_state_dict(state)


class _ReplicatedGradients(CompressedGradients):
    """Of a DDP model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        exchange: Exchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(exchange, scaler)
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        #: Buckets whose results DDP waits for.
        self._open: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Called by DDP for each bucket in turn, on every rank in the same order."""
        if bucket.index() == 0:
            self._open.clear()
            self.exchange.finish_step(finite=False)  # of a step that ended with an error
            self.begin()
        names = [self._names[id(p)] for p in bucket.parameters()]
        self.exchange.add(dict(zip(names, bucket.gradients(), strict=True)))
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = None
        if buffer.device.type == "cuda":
            devices = [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._open.append((future, buffer))
        if bucket.is_last():
            self.exchange.finish()
            self.exchange.finish_step(finite=not self.exchange.nonfinite)
            for waiting, result in self._open:
                waiting.set_result(result)
            self._open.clear()
        return future


class ShardedGradients(CompressedGradients):
    """The state of a sharded model's compressed gradients on this rank; see `compress_gradients`.

    A step ends with backward: a callback of the autograd engine, when all blocks were exchanged.

    Attributes:
        exchange: what does the work.
    """

    exchange: ShardedExchange

    def __init__(self, exchange: ShardedExchange, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(exchange, scaler)
        self._backward: int | None = None  # under way
        self._compress = True

    @contextmanager
    def uncompressed(self) -> Iterator[None]:
        """Within this context parameters are gathered as they are, and gradients exchanged so.

        Every rank enters it.
        """
        before, self._compress = self._compress, False
        try:
            yield
        finally:
            self._compress = before

    def reduce_block(
        self, blocks: Tensor, parts: Sequence[ShardedParameter], out: Tensor, *, mean: bool
    ) -> None:
        """One block's reduce-scatter; the first of a backward begins the step."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.exchange.finish_step(finite=False)  # of a backward that ended with an error
            self.begin(compress=self._compress)
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self.exchange.reduce(blocks, parts, out, mean=mean)

    def _end(self) -> None:
        self._backward = None
        self.exchange.finish()
        self.exchange.finish_step(finite=not self.exchange.nonfinite)

    def gather_block(self, own: Tensor, parts: Sequence[ShardedParameter], out: Tensor) -> None:
        """One block's all-gather."""
        self.exchange.gather(own, parts, out, compress=self._compress)


def compress_gradients(
    model: DistributedDataParallel | FSDPModule,
    dp_comp: Any = "conef+topk:0.1",
    *,
    param_comp: Compressor | str | None = None,
    network: ReplicaNetwork | None = None,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> CompressedGradients:
    """Makes the ranks of a DDP or FSDP2 model exchange compressed gradients.

    Every rank calls this once, after DDP or ``fully_shard`` and before the first backward, with the
    same arguments. From then on ``loss.backward()`` leaves in ``.grad`` what the method makes of
    all ranks' gradients: the same bits on each replica of DDP, of FSDP2 each rank's shard. It works
    with gradients added up (``no_sync``, ``set_requires_gradient_sync``) and in bf16; with
    unused parameters of DDP, and of FSDP2 under ``set_reduce_scatter_unused_params(True)``.

    A sharded model (ZeRO-3) holds a piece of each parameter and of the optimizer's state on a rank,
    but its ranks send pieces of *all* gradients, so plain error feedback remembers as much as the
    whole model on each. `ConEF`, the default, keeps that compressed. Its gradients are one third of
    what it sends; ``param_comp`` compresses the other two, the parameters that are gathered before
    forward and backward. The optimizer goes on with the exact ones. A step is a backward: under
    activation checkpointing use ``use_reentrant=False``, as the other kind has one in each block.

    Args:
        model: of DDP, with all parameters on one device; or the root of FSDP2's modules.
        dp_comp: a method such as ``GraVAC(TopK(0.1))``, ``DGC(0.001)`` or ``PowerSGD(2)``, a
            compressor, `ErrorFeedback`, `EF21` or `ConEF` round one, or a spec string. With
            `LocalSGD` gradients stay each rank's own, and parameters are averaged once a period.
        param_comp: of FSDP2, compressor of the matrices that are gathered, such as
            ``Quantize(8, scale=128)``; None for none.
        network: how replicas are connected.
        seed: of all random choices.
        scaler: the loss scaler in use, if any: what is kept is free of its scale. A step with NaN
            or Inf on any replica gives NaN on all, which it skips, and leaves no trace here.

    Returns:
        A handle with `report`, `history`, `state_dict` and `follow`; of FSDP2 also
        ``uncompressed()``, a context in which nothing is compressed.

    Raises:
        TypeError: a model that is not wrapped, or no method.
        ValueError: the model has a hook already, the method does not suit it, or ranks were given
            different arguments or models; on every rank.
    """
    sharded = isinstance(model, FSDPModule)
    assert isinstance(model, nn.Module)
    if not (sharded or isinstance(model, DistributedDataParallel)):
        raise TypeError(
            f"{type(model).__name__} is wrapped in neither DistributedDataParallel nor FSDP2: "
            "mpcomp.compress_gradients(DistributedDataParallel(model), ...), or call "
            "torch.distributed.fsdp.fully_shard on its blocks and on itself first"
        )
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    check_dense_gradients(whole, "compress_gradients")
    method = replica_method_of(dp_comp)
    if param_comp is not None and not sharded:
        raise ValueError(
            f"param_comp={shown(param_comp)} with a DDP model, whose replicas have all parameters "
            "and send none: leave it out, or shard the model with fully_shard"
        )
    codec = param_comp_of(param_comp)
    handle: CompressedGradients
    if isinstance(model, FSDPModule):
        _check_unhooked(model)
        handle = _compress_sharded(
            model, method, network=network, seed=seed, scaler=scaler, param_comp=codec
        )
    else:
        assert isinstance(model, DistributedDataParallel)
        parameters = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        scaled = scaler is not None and scaler.is_enabled()
        words = [
            f"{method}, {network or ReplicaNetwork()}, seed {seed}, scaled {scaled}",
            *(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items()),
        ]
        device = next(iter(parameters.values())).device
        _check_same_arguments(words, model.process_group, device)
        _check_unhooked(model)
        group = model.process_group
        exchange: Exchange
        if method.sync_schedule is not None:
            exchange = LocalExchange(
                parameters, method, group, network=network, seed=seed, agrees=scaled
            )
        else:
            unused = model.find_unused_parameters
            exchange = Exchange(
                parameters, method, group, network=network, seed=seed, unused=unused
            )
        handle = _ReplicatedGradients(model, exchange, scaler)
    _hooked.add(model)
    return handle


def _compress_sharded(
    model: FSDPModule,
    method: ReplicaMethod,
    *,
    network: ReplicaNetwork | None,
    seed: int,
    scaler: torch.amp.GradScaler | None,
    param_comp: Compressor | None,
) -> ShardedGradients:
    """For a model that `fully_shard` was called on, and its blocks."""
    assert isinstance(model, nn.Module)
    shards = Shards([model])
    words = [
        f"{method}, {network or ReplicaNetwork()}, seed {seed}, parameters {param_comp}",
        *(f"{part.name} {part.pieces} {part.dims}" for part in shards.parts),
        *shards.dtypes,
    ]
    _check_same_arguments(words, shards.group, shards.device)
    shards.check_dtypes()
    exchange = ShardedExchange(
        shards.parts,
        method,
        shards.group,
        device=shards.device,
        network=network,
        seed=seed,
        param_comp=param_comp,
    )
    handle = ShardedGradients(exchange, scaler)
    shards.connect(handle, gathers=param_comp is not None)
    return handle


def _check_unhooked(model: nn.Module) -> None:
    if model in _hooked:
        raise ValueError(
            "this model's gradients are compressed already, and it takes one method for ever: wrap "
            "the plain model anew to change it"
        )


def _check_same_arguments(
    words: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises ValueError on all ranks if they were given different things."""
    own = torch.tensor([fingerprint(list(words))], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    check_alike(
        [{"arguments": number.item()} for number in gathered],
        lambda found: (
            f"replicas {', '.join(str(d.rank) for d in found)} were given another model, method, "
            "network or seed than replica 0: give the same to all"
        ),
    )
