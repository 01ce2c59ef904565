"""Models of timm are traced, as a model of one's own is, and train as the plain model does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import mpcomp

timm = pytest.importorskip("timm", reason="timm is no dependency of mpcomp")

_TOKENS = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
_SWIN = {
    **{"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (1, 2, 1)},
    **{"num_heads": (1, 2, 2), "window_size": 4, "drop_path_rate": 0.0},
}
#: Class and sizes.
MODELS = {
    "vit": ("VisionTransformer", _TOKENS),
    "deit": ("VisionTransformerDistilled", _TOKENS),
    "eva": ("Eva", _TOKENS),
    "beit": ("Beit", _TOKENS),
    "cait": ("Cait", _TOKENS),
    "swin": ("SwinTransformer", _SWIN),
    "swin v2": ("SwinTransformerV2", _SWIN),
    "convnext": ("ConvNeXt", {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}),
    "mixer": ("MlpMixer", {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_blocks": 4}),
    # Their norms are over a batch, so that two microbatches are another model.
    "efficientnet": ("efficientnet_b0", None),
    "regnet": ("regnetx_002", None),
    "resnet": ("resnet18", None),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_timm_train_as_the_plain_model(name):
    """In three stages: loss, output and all gradients."""
    kind, sizes = MODELS[name]
    if sizes is None:
        model = timm.create_model(kind, num_classes=3, drop_rate=0.0)
    else:
        module = timm.models.deit if name == "deit" else timm.models
        model = getattr(module, kind)(num_classes=3, **sizes)
    size = (sizes or {}).get("img_size", 32)
    x, y = torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 1])
    plain = copy.deepcopy(model.train())
    output = plain(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    for chunks in (1,) if sizes is None else (1, 2):
        pipe = mpcomp.pipeline(copy.deepcopy(model), chunks, split=3, loss_fn=F.cross_entropy)
        assert_close(pipe.forward_backward(x, y), loss.detach())
        for (key, ours), theirs in zip(
            pipe.merge().named_parameters(), plain.parameters(), strict=True
        ):
            assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=key)
