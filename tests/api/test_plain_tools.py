"""Tools for plain models that are handed a pipeline: moves, DDP, logs, averages, schedulers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcomp


def pipeline(**given):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return mpcomp.pipeline(model, 2, split=2, loss_fn=F.cross_entropy, **given)


def batch(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.arange(6) % 8


def test_it_may_be_moved_to_where_it_is():
    pipe = pipeline()
    weights = [p.detach().clone() for p in pipe.parameters()]
    assert pipe.to("cpu") is pipe and pipe.to(torch.device("cpu"), torch.float32) is pipe
    assert all(torch.equal(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
    assert {p.dtype for p in pipe.to("cpu", torch.bfloat16).parameters()} == {torch.bfloat16}
    with pytest.raises(TypeError, match="stages are on cpu"):
        pipe.to("meta")


def test_config_is_the_models():
    assert not hasattr(pipeline(), "config")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.config = {"hidden_size": 8}
    assert mpcomp.pipeline(model, 1, split=2).config is model.config


def wrapped():
    """The refusal of DDP, and so of accelerate, which wraps by DDP."""
    pipe = pipeline()
    try:
        DistributedDataParallel(pipe)
    except TypeError as error:
        return str(error)
    return "wrapped"


def test_ddp_round_stages_is_refused_with_the_cure(ranks):
    for said in ranks(wrapped, 2):
        assert "hold stages, not copies" in said and "replicas=n" in said


class Holder(nn.Module):
    """A module that trains a pipeline, as Lightning's modules do."""

    def __init__(self):
        super().__init__()
        self.pipe = pipeline()

    def forward(self, *given):
        return self.pipe.forward_backward(*given)


def wrapped_within():
    """The refusal of DDP round alike stages, whose weights it would average, in training."""
    ddp = DistributedDataParallel(Holder())
    try:
        ddp(*batch())
    except TypeError as error:
        return str(error)
    return "trained"


def test_ddp_round_a_module_with_a_pipeline_is_refused_as_well(ranks):
    for said in ranks(wrapped_within, 2):
        assert "hold stages, not copies" in said and "devices=1" in said


class Writer:
    """A writer as TensorBoard has it."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag, value, step) -> None:
        self.seen.setdefault(tag, []).append((step, float(value)))


def logged():
    """Figures that a writer and a function were given in four steps, and those of the meters."""
    pipe = pipeline(act_comp="topk:0.25", grad_comp="quant:8")
    writer, called = Writer(), []
    pipe.log_to(writer)
    pipe.log_to(lambda figures, step: called.append((step, figures)), every=2)
    losses = [float(pipe.forward_backward(*batch(i))) for i in range(4)]
    return writer.seen, called, losses, pipe.report(show=False)


def check_logged(seen, called, losses, report) -> None:
    assert seen["loss"] == list(enumerate(losses))
    assert len(seen["seconds"]) == 4 and min(s for _, s in seen["seconds"]) > 0
    for entry in report["boundaries"]:
        name, train = f"cut {entry['boundary']} {entry['direction']}", entry["train"]
        assert sum(value for _, value in seen[f"{name}/bytes"]) == train["wire_bytes"]
        assert all(v == pytest.approx(train["ratio"]) for _, v in seen[f"{name}/ratio"])
        below = seen[f"{name}/below bf16"]
        assert all(v == pytest.approx(train["below_bf16"]) for _, v in below)
        assert all(0 < value < 1 for _, value in seen[f"{name}/relative error"])
        assert all(0.3 < value < 1 for _, value in seen[f"{name}/cosine"])
    assert sum(value for _, value in seen["bytes"]) == report["wire_bytes"]
    assert seen["below bf16"][0][1] == pytest.approx(report["below_bf16"])
    assert [step for step, _ in called] == [1, 3]
    assert sum(2 * figures["bytes"] for _, figures in called) == report["wire_bytes"]


def test_steps_are_logged_in_one_process():
    check_logged(*logged())


def test_steps_of_two_ranks_are_logged_on_the_first(ranks):
    first, second = ranks(logged, 2)
    check_logged(*first)
    assert second[0] == {} and second[1] == []


def test_a_checkpoint_does_not_upset_the_log(tmp_path):
    pipe, writer = pipeline(act_comp="topk:0.25"), Writer()
    pipe.save(tmp_path)
    pipe.log_to(writer)
    pipe.forward_backward(*batch())
    pipe.forward_backward(*batch())
    pipe.load(tmp_path)
    pipe.forward_backward(*batch())
    (_, one), (_, two), (_, three) = writer.seen["bytes"]
    assert one == two == three > 0


def test_tensorboard_gets_them(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard comes with mpcomp[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from mpcomp.monitor.step_log import tensorboard_writer

    pipe = pipeline(act_comp="quant:4")
    with tensorboard_writer(tmp_path) as writer:
        pipe.log_to(writer)
        loss = pipe.forward_backward(*batch())
    read = EventAccumulator(str(tmp_path)).Reload()
    assert read.Scalars("loss")[0].value == pytest.approx(float(loss))
    assert "cut 0 act/ratio" in read.Tags()["scalars"]


def test_what_is_no_writer_is_refused():
    with pytest.raises(TypeError, match=r"wandb\.log"):
        pipeline().log_to("runs")
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match="whole number of steps"):
            pipeline().log_to(Writer(), every=every)


def test_the_average_of_weights_is_that_of_the_plain_model():
    """`AveragedModel` copies what it averages, so it is given the model, not the pipeline."""
    pipe = pipeline()
    plain = copy.deepcopy(pipe.merge())
    ours, theirs = (
        torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for model in (pipe.merge(), plain)
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, plain)]
    for i in range(3):
        x, y = batch(i)
        pipe.forward_backward(x, y)
        for rows in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(plain(x[rows]), y[rows]) * 0.5).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ours.update_parameters(pipe.merge())
        theirs.update_parameters(plain)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    assert not torch.equal(next(ours.parameters()), next(pipe.parameters()))


def test_compiled_blocks_give_the_same_losses():
    """Blocks are compiled in place before the cut; "eager" captures graphs, without a compiler."""
    plain = pipeline()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for block in model:
        block.compile(backend="eager")
    compiled = mpcomp.pipeline(model, 2, split=2, loss_fn=F.cross_entropy)
    assert float(compiled.forward_backward(*batch())) == float(plain.forward_backward(*batch()))
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Accuracy:
    """A metric that keeps state, as those of torchmetrics."""

    def __init__(self) -> None:
        self.hits = self.rows = 0

    def update(self, output, target) -> None:
        self.hits += int((output.argmax(1) == target).sum())
        self.rows += len(target)

    def compute(self) -> float:
        return self.hits / self.rows


def test_a_metric_that_keeps_state_is_updated_with_what_the_pipeline_gives():
    pipe, metric = pipeline(act_comp="quant:8").eval(), Accuracy()
    loader = [batch(i) for i in range(3)]
    with torch.no_grad():
        for x, y in loader:
            metric.update(pipe(x), y)
    mean = pipe.evaluate(loader, lambda o, y: (o.argmax(1) == y).float().mean())
    assert metric.rows == 18 and metric.compute() == pytest.approx(mean)


def test_schedulers_of_torch_follow_the_optimizer():
    pipe = pipeline()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    rates = []
    for i in range(3):
        pipe.forward_backward(*batch(i))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([0.05, 0.025, 0.0125])
    assert optimizer.param_groups[0]["lr"] == rates[-1]
