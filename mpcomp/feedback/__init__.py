"""What links remember: wrappers round any compressor."""

from mpcomp.feedback.base import Feedback, Receiver, Sender
from mpcomp.feedback.conef import ConEF
from mpcomp.feedback.error_feedback import EFMixed, ErrorFeedback
from mpcomp.feedback.estimate import AQSGD, EF21

__all__ = ["AQSGD", "EF21", "ConEF", "EFMixed", "ErrorFeedback", "Feedback", "Receiver", "Sender"]
