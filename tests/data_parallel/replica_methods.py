"""Every method between replicas, in settings that suit the small models of these tests.

Keyed by class; `test_ranks_equal_weights.py` fails for a method that has no entry here, so a new
one is under all laws from its first day.
"""

from mpcomp.core.spec import SpecValue, registered
from mpcomp.data_parallel.base import ReplicaMethod
from mpcomp.data_parallel.methods import Compressed

#: A clock that repeats exactly.
LINKS = "bandwidth_mbps=10:latency_ms=0.1:compute_ms=1"

BY_CLASS: dict[str, list[str]] = {
    "GraVAC": [
        f"gravac:cf=2-32:eps=0.5:window=5:smoothing=0.5:{LINKS}+topk:0.1",
        f"gravac:cf=2-8:eps=0.5:window=5:exact=true:smoothing=0.5:{LINKS}+topk:0.1+bf16",
        f"gravac:cf=4-32:eps=0.3:window=5:policy=geometric:{LINKS}+quant:8:rounding=stochastic",
        f"gravac:cf=1.5-8:eps=0.2:window=5:{LINKS}+randomk:0.5",
    ],
    "Accordion": [
        "accordion:low=topk/0.5:high=topk/0.1:interval=4:span=2",
        "accordion:low=powersgd/2:high=powersgd/1:interval=4",
    ],
    "DGC": ["dgc:0.1", "dgc:0.05:warmup_steps=20:nesterov=true:clip=4+fp16"],
    "RedSync": ["redsync:0.1", "redsync:0.1:same_sign=true:search=binary"],
    "OneBit": ["onebitsgd"],
    "PowerSGD": ["powersgd:1", "powersgd:2:min_saving=1:storage=bf16"],
    "LocalSGD": [
        "diloco:5",
        "diloco:5+ef+topk:0.1+quant:2",
        "diloco:4:parts=2+ef:decay=0.95+topk:0.2+quant:2",
        "diloco:5:lr=1:momentum=0+ef21+topk:0.2",
        "diloco:5+conef:0.4+randomblock:0.2",
        "diloco:5+ef:storage=8+quant:4",
    ],
}

#: They leave gradients to each replica, so that others' laws are not theirs but those of
#: `test_ranks_local_sgd.py`.
APART = BY_CLASS["LocalSGD"]

#: Compressors, alone and in feedback.
COMPRESSED: list[str] = [
    "bf16",
    "topk:0.2",
    "randomblock:0.2:unbiased=true",
    "qsgd:4",
    "ef+topk:0.1",
    "ef:storage=8+topk:0.1+quant:8",
    "ef:lr_scaled=true+sampledtopk:0.1",
    "ef+randomk:0.2",
    "ef+randomblock:0.2",
    "ef+sign",
    "ef+quant:4:rounding=stochastic",
    "ef+lowrank:1",
    "ef21+topk:0.2",
    "ef21:storage=bf16+topk:0.2",
    "conef+topk:0.1",
    "conef:0.4:storage=bf16+randomblock:0.2",
    "conef:error=qsgd/8:lr_scaled=true+topk:0.2",
    "conef:0.3:improved=v2:beta=0.8+topk:0.2",
]

SPECS = [
    *(spec for specs in BY_CLASS.values() for spec in specs if spec not in APART),
    *COMPRESSED,
]

#: One of each class, and of each kind of compressor: for what takes long.
MAIN = [
    *(specs[0] for specs in BY_CLASS.values() if specs is not APART),
    "topk:0.2",
    "randomblock:0.2:unbiased=true",
    "qsgd:4",
    "ef+topk:0.1",
    "ef+randomk:0.2",
    "ef+sign",
    "ef21+topk:0.2",
    "conef+topk:0.1",
]

#: Those that remember something from one step to the next.
STATEFUL = [spec for spec in SPECS if spec not in COMPRESSED[:4]]


def replica_classes() -> set[type[SpecValue]]:
    """The classes of the library that go between replicas alone."""
    found: set[type[SpecValue]] = set(registered(ReplicaMethod))
    return {cls for cls in found if cls.__module__.startswith("mpcomp.")} - {Compressed}
