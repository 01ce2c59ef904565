"""Engines, which run stages: local (torchgpipe), distributed (torch.distributed.pipelining)."""
