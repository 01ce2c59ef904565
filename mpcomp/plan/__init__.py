"""Prediction: what a step of a pipeline takes on links and machines that need not be here."""

from mpcomp.plan.coding import Coding, CutCost, measure_coding
from mpcomp.plan.network import Network
from mpcomp.plan.prediction import Compute, Prediction, predict
from mpcomp.plan.timeline import Messages, Span, StageTimes, Timeline, timeline

__all__ = [
    "Coding",
    "Compute",
    "CutCost",
    "Messages",
    "Network",
    "Prediction",
    "Span",
    "StageTimes",
    "Timeline",
    "measure_coding",
    "predict",
    "timeline",
]
