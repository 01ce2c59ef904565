"""Endpoints: what a link keeps of its method, and how that makes a message of a tensor.

A module here has the endpoint of one kind of method, and is found without a line elsewhere.
"""

from mpcomp.links.endpoints.base import Endpoint, PlainPlan, Plan, Plans, StateSize, endpoint_of

__all__ = ["Endpoint", "PlainPlan", "Plan", "Plans", "StateSize", "endpoint_of"]
