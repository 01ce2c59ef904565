"""Memory from message to message: formulas, the state behind them, and methods of both."""

from mpcomp.core.spec import import_all
from mpcomp.feedback.base import EvalChoice, Feedback
from mpcomp.feedback.conef import ConEF
from mpcomp.feedback.ef21 import AQSGD, EF21
from mpcomp.feedback.error_feedback import EFMixed, ErrorFeedback
from mpcomp.feedback.memory import Field, Memory, Sent, Side, State

__all__ = [
    "AQSGD",
    "EF21",
    "ConEF",
    "EFMixed",
    "ErrorFeedback",
    "EvalChoice",
    "Feedback",
    "Field",
    "Memory",
    "Sent",
    "Side",
    "State",
]

import_all(__name__, __path__)
