"""An audit of what crosses the cuts of a language model: structure, rate, harm.

    python -m recipes.lab.rate_audit --model model.gguf --data FOLDER --split 3 \\
        --seq-len 256 --batch-size 4 --out audit.json --plot audit.png

For every cut, of activations and of gradients:

* structure: energy in the means of channels and in the strongest tokens, directions that hold half
  and nine tenths of the rest (tokens scaled to equal energy, as `step` sees them);
* change: what is different at the second visit of a batch, after an epoch of uncompressed training;
* rate: bits an element that `step` sends at each step, and what an AQ-SGD of the same step sends at
  the second visit;
* harm: what the error of one cut alone does, to the loss of held-out text (activations) and to the
  gradients of the weights before it (gradients: energy of their error over their own);
* a budget: the step for each cut that makes the fewest bits together while the harms add up to at
  most --budget nats, beside the best step that is the same for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import mpcomp
from recipes.bench.report import tidy
from recipes.optimizers import make_optimizer
from recipes.placement import parse_split
from recipes.plots import COLOURS
from recipes.text_config import TextConfig
from recipes.text_model import make_model, split_of
from recipes.tokens import TokenLoader
from recipes.wikitext import TextData, load_data

STEPS: Final = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
GRADIENT_STEPS: Final = (0.5, 1.0, 1.5, 2.0, 3.0)
STRONG: Final = 0.01  # of the tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Audits, prints the tables, and writes the figures and the picture."""
    options = _parse(argv)
    try:
        config = _config(options)
        text = load_data(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    audit = Audit(config, text, options)
    if options.record is not None:
        save_file(audit.recorded(), options.record)
        return
    figures = audit.run()
    print(report(figures))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2))
    if options.plot is not None:
        plot(figures, options.plot)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m recipes.lab.rate_audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=TextConfig.model, help="hub name, folder, or GGUF file")
    add("--data", default=TextConfig.data, help="hub name, folder, text file, or python-docs")
    add("--split", default="3", help="stages, as of recipes.wikitext")
    add("--seq-len", type=int, default=256)
    add("--batch-size", type=int, default=4, help="blocks of a message")
    add("--batches", type=int, default=3, help="that are looked at")
    add("--train-limit", type=int, default=4, help="articles of the epoch in between")
    add("--eval-limit", type=int, default=8, help="blocks whose loss is taken")
    add("--lr", type=float, default=2e-5, help="of AdamW in that epoch")
    add("--steps", type=float, nargs="+", default=list(STEPS), help="of activations")
    add("--gradient-steps", type=float, nargs="+", default=list(GRADIENT_STEPS))
    add("--budget", type=float, default=0.02, help="nats of loss that all cuts may cost")
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    add("--record", type=Path, metavar="SAFETENSORS", help="for what crosses, instead of an audit")
    add("--out", type=Path, metavar="JSON", help="for the figures")
    add("--plot", type=Path, metavar="PNG", help="for the picture")
    return parser.parse_args(argv)


def _config(options: argparse.Namespace) -> TextConfig:
    return TextConfig.for_model(
        model=options.model,
        data=options.data,
        split=options.split,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        train_limit=options.train_limit,
        eval_limit=options.eval_limit,
        lr=options.lr,
        optimizer="adamw",
        chunks=1,
        threads=options.threads,
        seed=options.seed,
    )


def activations(step: float) -> mpcomp.ECSQ:
    """The codec of activations that is audited."""
    return mpcomp.ECSQ(step, centre=True)


def gradients(step: float) -> mpcomp.ECSQ:
    """The codec of gradients that is audited."""
    return mpcomp.ECSQ(step, scale="tensor")


@dataclass
class Seen:
    """Tensors of one visit of the batches, by cut: fp32 [tokens, channels]."""

    acts: dict[int, list[Tensor]] = field(default_factory=dict)
    grads: dict[int, list[Tensor]] = field(default_factory=dict)


class Audit:
    """The measurements on one model and text.

    Args:
        config: the model, its cuts, and the batches.
        text: the blocks.
        options: steps, the number of batches, and the budget.
    """

    def __init__(self, config: TextConfig, text: TextData, options: argparse.Namespace) -> None:
        self.config, self.options = config, options
        self.model: nn.Module = make_model(config, text.tokenizer)
        self.split = parse_split(split_of(config, self.model.config))
        self.train = TokenLoader(blocks=text.train, batch_size=config.batch_size, seed=config.seed)
        self.held_out = TokenLoader(blocks=text.held_out, batch_size=config.batch_size)
        self.batches = [
            batch for batch, *_ in itertools.islice(self.train.epoch(0), options.batches)
        ]

    def run(self) -> dict[str, Any]:
        """The figures: of each cut, and the budget's steps."""
        first = self._visit()
        links = self._pipe().report(show=False)["boundaries"]
        names = [link["after"] for link in links if link["direction"] == "act"]
        cuts: list[dict[str, Any]] = [
            {
                "cut": i,
                "after": names[i],
                "activations": structure(first.acts[i]),
                "gradients": structure(first.grads[i]),
            }
            for i in sorted(first.acts)
        ]
        plain_loss = self._loss()
        plain_gradients = self._gradients()
        options = self.options

        def loss(coded: mpcomp.ECSQ, cut: int) -> dict[str, float]:
            return {"loss": self._loss({cut: coded}) - plain_loss}

        def error(coded: mpcomp.ECSQ, cut: int) -> dict[str, float]:
            return {"error": distance(plain_gradients, self._gradients({cut: coded}))}

        for cut in tqdm(cuts, unit="cut"):
            i = cut["cut"]
            settings = (activations, options.steps, first.acts[i], loss)
            cut["activation_steps"] = list(_rows(i, *settings))
            settings = (gradients, options.gradient_steps, first.grads[i], error)
            cut["gradient_steps"] = list(_rows(i, *settings))
        self._train_an_epoch()
        second = self._visit()
        for cut in cuts:
            i = cut["cut"]
            for kind, coded, rows, old, new in (
                ("activations", activations, cut["activation_steps"], first.acts, second.acts),
                ("gradients", gradients, cut["gradient_steps"], first.grads, second.grads),
            ):
                changes = [b - a for a, b in zip(old[i], new[i], strict=True)]
                cut[f"change of {kind}"] = {
                    **structure(changes),
                    "energy": energy(changes) / energy(old[i]),
                }
                for row in rows:
                    row["bits_again"] = bits_again(coded(row["step"]), old[i], new[i])
        return {
            "settings": {k: str(v) for k, v in vars(options).items()},
            "loss": plain_loss,
            "cuts": cuts,
            "budget": best_steps(cuts, options.budget),
        }

    def recorded(self) -> dict[str, Tensor]:
        """Tensors that cross each cut in the first batch, by name: fp32 [tokens, channels]."""
        seen = self._visit()
        of_cuts = {"activations": seen.acts, "gradients": seen.grads}
        return {
            f"{kind} at cut {cut}": tensors[0]
            for kind, cuts in of_cuts.items()
            for cut, tensors in cuts.items()
        }

    def _pipe(self, acts: Any = None, grads: Any = None) -> mpcomp.Pipeline:
        # Pipelines share the model's weights, so that each costs next to nothing.
        pipe = mpcomp.pipeline(
            self.model,
            chunks=1,
            split=self.split,
            act_comp=acts or None,
            grad_comp=grads or None,
            loss_fn=mpcomp.CausalLMLoss(),
            engine="local",
        )
        pipe.train()  # a loaded model is in evaluation mode
        return pipe

    def _visit(self) -> Seen:
        """Activations that cross the cuts, and the gradients that come back."""
        seen = Seen()
        pipe = self._pipe()
        handles = [
            stage.register_forward_hook(_recorder(i, seen))
            for i, stage in enumerate(pipe.stages)
            if i < len(pipe.stages) - 1
        ]
        for batch in self.batches:
            pipe.forward_backward(batch)
        for handle in handles:
            handle.remove()
        self.model.zero_grad()
        return seen

    def _loss(self, acts: Mapping[int, mpcomp.Compressor] | None = None) -> float:
        return float(self._pipe(acts).evaluate(self.held_out))

    def _gradients(self, grads: Mapping[int, mpcomp.Compressor] | None = None) -> list[Tensor]:
        """Gradients of all parameters, mean over the batches."""
        pipe = self._pipe(grads=grads)
        for batch in self.batches:
            pipe.forward_backward(batch)
        found = [
            parameter.grad.clone() / len(self.batches)
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        self.model.zero_grad()
        return found

    def _train_an_epoch(self) -> None:
        pipe = self._pipe()
        optimizer = make_optimizer(self.config, pipe)
        for batch, *_ in tqdm(self.train.epoch(0), total=len(self.train), unit="step"):
            pipe.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()


def _rows(
    cut: int,
    codec: Callable[[float], mpcomp.ECSQ],
    steps: Sequence[float],
    tensors: Sequence[Tensor],
    harm: Callable[[mpcomp.ECSQ, int], dict[str, float]],
) -> Iterator[dict[str, float]]:
    """Rate and harm of the codec at each step, at one cut."""
    for step in steps:
        coded = codec(step)
        yield {"step": step, "bits": bits_of(coded, tensors), **harm(coded, cut)}


def _recorder(cut: int, seen: Seen) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.acts.setdefault(cut, []).append(_tokens(output))
        gradients = seen.grads.setdefault(cut, [])
        output.register_hook(lambda g: gradients.append(_tokens(g)))  # type: ignore[no-untyped-call]

    return keep


def _tokens(x: Tensor) -> Tensor:
    return x.detach().float().reshape(-1, x.shape[-1])


def energy(tensors: Sequence[Tensor]) -> float:
    """Sum of squares."""
    return sum(float(x.double().square().sum()) for x in tensors)


def distance(plain: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Energy of the difference over that of the first."""
    return energy([b - a for a, b in zip(plain, other, strict=True)]) / energy(plain)


def structure(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Shares of energy in means and strong tokens; directions of what is left."""
    x = torch.cat(list(tensors)).double()
    norms = x.square().sum(1)
    num_strong = max(1, round(STRONG * len(x)))
    y = x / norms.clamp_min(1e-300).sqrt()[:, None]  # each token with the same energy
    mean = y.mean(0)
    y = y - mean
    spectrum = torch.linalg.eigvalsh(y.T @ y).flip(0).clamp_min(0)
    held = spectrum.cumsum(0) / spectrum.sum().clamp_min(1e-300)
    return {
        "strong_tokens": float(norms.topk(num_strong).values.sum() / norms.sum()),
        "means": float(mean.square().sum()),
        "directions_half": int((held < 0.5).sum()) + 1,
        "directions_90": int((held < 0.9).sum()) + 1,
        "channels": x.shape[1],
    }


def bits_of(compressor: mpcomp.Compressor, tensors: Sequence[Tensor]) -> float:
    """Bits an element of their messages."""
    return _bits(compressor.compress(x) for x in tensors) / sum(x.numel() for x in tensors)


def bits_again(compressor: mpcomp.ECSQ, before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Bits an element of what an AQ-SGD sends at the second visit, that has decoded the first."""
    plain = mpcomp.ECSQ(compressor.step, scale=compressor.scale)

    def messages() -> Iterator[tuple[Tensor, ...]]:
        for old, new in zip(before, after, strict=True):
            meta = mpcomp.TensorMeta.of(old)
            known = compressor.decompress(compressor.compress(old), meta)
            yield plain.compress_against(new - known, new)

    return _bits(messages()) / sum(x.numel() for x in after)


def _bits(payloads: Iterator[tuple[Tensor, ...]]) -> float:
    return 8 * sum(part.numel() * part.element_size() for payload in payloads for part in payload)


def best_steps(cuts: Sequence[Mapping[str, Any]], budget: float) -> dict[str, Any]:
    """Steps of activations with the fewest bits whose harms add up to at most ``budget`` nats.

    For each cut its own, and one for all; None where no step is mild enough.
    """
    rows = [cut["activation_steps"] for cut in cuts]

    def best(choices: Iterator[tuple[Any, ...]]) -> dict[str, Any] | None:
        # A loss below the uncompressed one is luck, which pays for nothing.
        fitting = [c for c in choices if sum(max(0.0, row["loss"]) for row in c) <= budget]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda c: sum(row["bits"] for row in c))
        return {
            "steps": [row["step"] for row in chosen],
            "bits": sum(row["bits"] for row in chosen) / len(chosen),
            "loss": sum(row["loss"] for row in chosen),
        }

    return {
        "nats": budget,
        "each": best(itertools.product(*rows)),
        "same": best(zip(*rows, strict=True)),
    }


def report(figures: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    kinds = ("activations", "change of activations", "gradients", "change of gradients")
    of_structure = [
        [
            f"{cut['cut']} ({cut['after']})",
            kind,
            f"{100 * cut[kind].get('energy', 1.0):.2f} %",
            f"{100 * cut[kind]['strong_tokens']:.0f} %",
            f"{100 * cut[kind]['means']:.0f} %",
            f"{cut[kind]['directions_half']} / {cut[kind]['directions_90']}",
            cut[kind]["channels"],
        ]
        for cut in figures["cuts"]
        for kind in kinds
    ]
    of_acts = [
        [cut["cut"], row["step"], row["bits"], row["bits_again"], row["loss"]]
        for cut in figures["cuts"]
        for row in cut["activation_steps"]
    ]
    of_grads = [
        [cut["cut"], row["step"], row["bits"], row["bits_again"], f"{100 * row['error']:.2f} %"]
        for cut in figures["cuts"]
        for row in cut["gradient_steps"]
    ]
    headers = (
        ("cut", "of", "energy", f"in {100 * STRONG:.0f} % of tokens", "in means",
         "directions for 50 / 90 %", "channels"),
        ("cut", "step", "bits", "bits at the second visit", "loss [nats]"),
        ("cut", "step", "bits", "bits at the second visit", "error of the weights' gradients"),
    )  # fmt: skip
    tables = [
        tabulate(rows, names, tablefmt="pipe", floatfmt=".3f", disable_numparse=[0])
        for rows, names in zip((of_structure, of_acts, of_grads), headers, strict=True)
    ]
    return "\n\n".join([*tables, *_budget_lines(figures["budget"])])


def _budget_lines(budget: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, words in (("each", "a step for each cut"), ("same", "one step for all cuts")):
        found = budget[key]
        said = (
            "none of the steps is mild enough"
            if found is None
            else f"{', '.join(f'{step:g}' for step in found['steps'])}: {found['bits']:.2f} bits "
            f"an element, {found['loss']:+.4f} nats"
        )
        lines.append(f"within {budget['nats']:g} nats, {words}: {said}")
    return lines


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Draws rate against step and harm against rate, a colour for each cut, into a PNG file."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(13, 4.5), dpi=110, layout="constrained")
    rate, harm, error = figure.subplots(1, 3)
    for colour, cut in zip(COLOURS * len(figures["cuts"]), figures["cuts"], strict=False):
        acts, grads = cut["activation_steps"], cut["gradient_steps"]
        name = f"cut {cut['cut']} (after {cut['after']})"
        steps = [row["step"] for row in acts]
        rate.plot(steps, [row["bits"] for row in acts], "o-", color=colour, label=name)
        again = [row["bits_again"] for row in acts]
        rate.plot(steps, again, "o--", color=colour, fillstyle="none")
        harm.plot([row["bits"] for row in acts], [row["loss"] for row in acts], "o-", color=colour)
        error.plot(
            [row["bits"] for row in grads],
            [100 * row["error"] for row in grads],
            "s-",
            color=colour,
        )
    rate.set(
        xlabel="step of activations [rms of the token]",
        ylabel="bits an element",
        title="first visit (line), second (dashed)",
        xscale="log",
        yscale="log",
    )
    harm.set(
        xlabel="bits an element",
        ylabel="loss of held-out text, more [nats]",
        title="activations of one cut coded",
    )
    harm.set_yscale("symlog", linthresh=1e-3)
    error.set(
        xlabel="bits an element",
        ylabel="error of the weights' gradients [% of energy]",
        title="gradients of one cut coded",
        yscale="log",
    )
    for axes in (rate, harm, error):
        tidy(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
