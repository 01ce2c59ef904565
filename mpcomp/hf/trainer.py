"""A transformers `Trainer` and an `Accelerator` whose model is a pipeline, in one process or many.

`Trainer` believes that each process trains a copy of the model on its own share of the data, and
has accelerate wrap the model in DDP. Ranks of a pipeline are the parts of one model, which see the
same batches. So three things are other than in `Trainer`, and its loop stays what it is::

    accelerate       one process to it: no DDP, no shares of the data, nothing to gather
    a batch          pipe.forward_backward; the norm of gradients is over all stages
    a checkpoint     the whole model as `save_pretrained` writes it, and `pipe.save` beside it

It needs transformers 5 and accelerate: ``pip install "mpcomp[lm]"``.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.training_args import ParallelMode

from mpcomp.api.grad_norm import clip_grad_norm_
from mpcomp.api.pipeline import Pipeline
from mpcomp.core.loss import is_sum, num_terms
from mpcomp.core.microbatch import num_rows

__all__ = ["PipelineAccelerator", "PipelineTrainer"]

#: Folder of `pipe.save` within a checkpoint of the trainer.
_STATE = "pipeline"
#: What a pipeline has in another way, or not at all, and what to do instead.
_CURES: Final = {
    "fp16": "use bf16=True, or pipeline(..., scaler=...) in a loop of your own",
    "deepspeed": "it shards what is cut into stages already; leave it out",
    "fsdp": "it shards what is cut into stages already; leave it out",
    "torch_compile": "compile the model's blocks before cutting: block.compile()",
    "activation_checkpointing": "use mpcomp.pipeline(..., recompute=True)",
    "gradient_checkpointing": "use mpcomp.pipeline(..., recompute=True)",
    "label_smoothing_factor": "use mpcomp.pipeline(..., loss_fn=...)",
    "neftune_noise_alpha": "it hooks the whole model's embedding; leave it out",
    "auto_find_batch_size": "ranks would find different ones; give a size",
    "use_liger_kernel": "patch the model before cutting it",
    "fp16_full_eval": "cut a model in that dtype",
    "bf16_full_eval": "cut a model in that dtype",
    "push_to_hub": "push the folder that save_model writes",
    "parallelism_config": "the pipeline is how the model is parallel; leave it out",
    "batch_eval_metrics": "metrics are computed over the whole evaluation; leave it out",
    "optim_target_modules": "such optimizers look for modules of the whole model",
    "compute_loss_func": "use mpcomp.pipeline(..., loss_fn=f), f(output, labels)",
    "model_init": "pass the pipeline itself",
}


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` for ``model=mpcomp.pipeline(...)``; everything else as there.

    ``python train.py`` trains all stages in one process, ``torchrun train.py`` a stage a rank:
    every rank runs the same script with the same data, and ``per_device_train_batch_size`` is the
    rows of a batch however many ranks there are. Loss, metrics and what `predict` returns are the
    same on every rank. The loss is the pipeline's ``loss_fn``, for a causal language model that of
    transformers.

    Args:
        model: the pipeline, of one replica.
        args: as of `Trainer`; what cannot work is refused by its name.
        kwargs: as of `Trainer`.

    Raises:
        TypeError: a model that is no pipeline.
        ValueError: a setting that a pipeline has in another way, or not at all.
    """

    def __init__(
        self, model: Pipeline, args: TrainingArguments | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(model, Pipeline):
            raise TypeError(
                f"PipelineTrainer got a {type(model).__name__}: cut the model first, "
                "PipelineTrainer(mpcomp.pipeline(model, chunks=4, split=2), args, ...)"
            )
        args = TrainingArguments("tmp_trainer") if args is None else args
        _refuse(model, args, kwargs)
        loss_fn = model._loss_fn
        if loss_fn is None:
            raise ValueError(
                "the pipeline has no loss: mpcomp.pipeline(..., loss_fn=F.cross_entropy); that of "
                "a causal language model is known"
            )
        self._loss_fn = loss_fn
        whole: Any = model.cut_stages[0].original
        unwrapped = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        self._forward = inspect.signature(unwrapped.forward).parameters
        args._n_gpu = min(args.n_gpu, 1)  # several are the pipeline's, not DataParallel's
        names = args.label_names or ["labels"]
        if len(names) != 1:
            raise ValueError(f"label_names={names}: a pipeline's loss has one target; name one")
        args.label_names = names
        self._label_name = names[0]
        super().__init__(model=model, args=args, **kwargs)
        # What `Trainer` reads from the class of its model: the terms of all batches that are
        # accumulated are counted. As there, labels that have no position before them count too if
        # the model does not name its loss (GPT-2 does not), so that losses are the same.
        self.model_accepts_loss_kwargs = True
        named = LOSS_MAPPING.get(str(getattr(unwrapped, "loss_type", None)))
        self._loss_shifts_labels = named is ForCausalLMLoss
        self.can_return_loss = False

    @property
    def pipe(self) -> Pipeline:
        """The pipeline."""
        assert isinstance(self.model, Pipeline)
        return self.model

    # -- accelerate ---------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Makes an accelerator to which the ranks of a pipeline are one process."""
        super().create_accelerator_and_postprocess()
        self.accelerator = PipelineAccelerator(**self._accelerator_args)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return model

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of a step, [batch times accumulation]: ranks add none."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    # -- the model ----------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = [*self._forward, "label", "label_ids", *self.label_names]
            self._signature_columns: Any = list(dict.fromkeys(names))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of parameters that decay: not those of norms, nor biases."""
        assert isinstance(model, Pipeline)
        # Of each stage, as stages have the model's names and the pipeline's list of them has not.
        return [
            name
            for stage in model.stages
            for name in super(PipelineTrainer, self).get_decay_parameter_names(stage)
        ]

    # -- steps --------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs a batch forward and backward through the cuts; returns its part of the loss."""
        pipe = self.pipe
        pipe.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # of optimizers that average weights
        batch, labels = self._with_labels(self._prepare_inputs(inputs))
        share = self._share_of(labels, num_items_in_batch)
        with self.accelerator.autocast():
            loss = pipe.forward_backward(batch, labels, weight=share)
        return loss.to(self.args.device) * share

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Terms of the losses of all batches that are accumulated."""
        if self.pipe.cut_stages[0].is_causal_lm:
            return super()._get_num_items_in_batch(batch_samples, device)
        of_batches = [self._with_labels(inputs)[1] for inputs in batch_samples]
        return sum(self._num_terms(labels) for labels in of_batches)

    def _share_of(self, labels: Any, all_terms: Any) -> float:
        """The share of a batch in a loss over ``all_terms``, as `Trainer` counts them."""
        if is_sum(self._loss_fn):
            return 1.0
        return self._num_terms(labels) / (float(all_terms) or 1.0)

    def _num_terms(self, labels: Any) -> float:
        return num_terms(self._loss_fn, labels, num_rows(labels))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """No part of this trainer: the loss is the pipeline's.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PipelineTrainer.compute_loss: the output is on the rank of the last stage alone, so "
            "the loss is given to the pipeline, mpcomp.pipeline(..., loss_fn=f), f(output, labels)"
        )

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(self.pipe, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            return clip_grad_norm_(self.pipe, float("inf"))
        return grad_norm

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, logits and labels of a batch, on every rank.

        Logits cross to all ranks; with `prediction_loss_only` the loss alone does.
        """
        inputs = self._prepare_inputs(inputs)
        batch: Any = inputs
        labels: Any = None
        share = 1.0
        if inputs.get(self._label_name) is not None:
            batch, labels = self._with_labels(inputs)
            all_terms = self._get_num_items_in_batch([inputs], self.args.device)
            share = self._share_of(labels, all_terms)
        with torch.no_grad(), self.accelerator.autocast():
            if not prediction_loss_only:
                output = self.pipe(batch, labels)
                logits, loss = (output, None) if labels is None else output
                return loss if loss is None else loss * share, logits.detach(), labels
            if labels is None:
                return None, None, None
            mean = self.pipe.evaluate([(batch, labels)])
            return torch.tensor(mean * share, device=self.args.device), None, None

    def _with_labels(self, inputs: Any) -> tuple[dict[str, Any], Any]:
        """The batch without its labels, and the labels."""
        name = self._label_name
        if inputs.get(name) is None:
            raise ValueError(
                f"a batch has {', '.join(inputs)} and no {name!r}, which the loss is of: give the "
                "dataset that column, or name it by TrainingArguments(label_names=[...])"
            )
        return {k: v for k, v in inputs.items() if k != name}, inputs[name]

    # -- checkpoints --------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, as `from_pretrained` reads it; every rank calls it."""
        folder = Path(str(output_dir if output_dir is not None else self.args.output_dir))
        self.pipe.save_pretrained(folder)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipe.save(
            Path(output_dir) / _STATE,
            optimizer=_plain(self.optimizer),
            scheduler=self.lr_scheduler,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the state of the links and the optimizer, when that is made."""
        folder = Path(resume_from_checkpoint) / _STATE
        if not folder.is_dir():
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} has no folder {_STATE!r}: "
                "expected a checkpoint of PipelineTrainer, without save_only_model"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.pipe.load(
                Path(checkpoint) / _STATE,
                optimizer=_plain(self.optimizer),
                scheduler=self.lr_scheduler,
            )

    def _load_best_model(self) -> None:
        self.pipe.load(Path(str(self.state.best_model_checkpoint)) / _STATE)


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` to which all ranks are one process, as they hold one model.

    ``prepare`` takes the pipeline with the rest and leaves it as it is; loaders give every rank
    all rows, and a scheduler goes one step a step. ``forward_backward`` is in place of `backward`,
    with ``weight=1 / n`` for n accumulated batches. `is_main_process` is true of the first rank.
    """

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The pipeline as it is: neither moved nor wrapped."""
        if all(model is not known for known in self._models):
            self._models.append(model)
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, which goes one step a step however many ranks there are."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # else it takes the ranks for so many batches
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """No part of this accelerator: `forward_backward` has gone backward already.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PipelineAccelerator.backward: pipe.forward_backward(batch, weight=1 / n) goes "
            "backward too, n the batches that are accumulated; leave accelerator.backward out"
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """No part of this accelerator, which knows the gradients of this rank alone.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PipelineAccelerator.clip_grad_norm_: the norm is one over the stages of all ranks; "
            "use mpcomp.clip_grad_norm_(pipe, max_norm)"
        )

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """No part of this accelerator: it would write the state of one rank, and none of links.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PipelineAccelerator.save_state: each rank has its own part of the state; use "
            "pipe.save(folder, optimizer=..., scheduler=...), on every rank"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """No part of this accelerator: see `save_state`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PipelineAccelerator.load_state: each rank has its own part of the state; use "
            "pipe.load(folder, optimizer=..., scheduler=...), on every rank"
        )

    def gather(self, tensor: Any) -> Any:
        """Values that every rank has already."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Values that every rank has already; of the last batch's loss one for each of its rows."""
        return input_data if use_gather_object else super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Values that every rank has already."""
        return tensor

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Values that every rank has already."""
        return tensor


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer within accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _refuse(pipe: Pipeline, args: TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for what a pipeline has in another way, or not at all."""
    if pipe.num_replicas > 1:
        raise ValueError(
            f"PipelineTrainer with replicas={pipe.num_replicas}: its ranks see the same batches; "
            "train replicas in a loop of your own, with mpcomp.ReplicaSampler"
        )
    if pipe.first_data is not None:
        raise ValueError(
            "PipelineTrainer with data='first': its loop takes a batch on every rank; build the "
            "pipeline with data='all', or train in a loop of your own"
        )
    for name, cure in _CURES.items():
        value = kwargs[name] if name in kwargs else getattr(args, name, None)
        if value:
            raise ValueError(f"PipelineTrainer with {name}={value!r}: {cure}")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "PipelineTrainer with load_best_model_at_end and save_only_model: the best model is "
            "read from the pipeline's own checkpoint; leave save_only_model out"
        )
    if args.parallel_mode is ParallelMode.DISTRIBUTED and pipe.num_ranks == 1:
        raise ValueError(
            f"{args.world_size} processes, but the pipeline is in each of them: leave out "
            "engine='local', or start one process"
        )
