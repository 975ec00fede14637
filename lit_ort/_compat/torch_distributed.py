"""Private interfaces of torch.distributed: DistributedDataParallel, process groups, pipelines, attention in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.nn.parallel import DistributedDataParallel

from lit_ort._compat.patching import replaced
from lit_ort._compat.torch_dynamo import graphs_by_bucket

_FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name, which a graph can hold where it can't hold the group itself."""
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType] - a str to torch before 2.13


def buffer_broadcast(enabled: bool) -> dict[str, bool]:
    """DistributedDataParallel's argument for the broadcast of buffers before each forward; torch 2.13 renamed it."""
    return {"forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers": enabled}


@contextmanager
def graphs_of_buckets(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Lets Dynamo cut graphs where a bucket's gradients are complete.

    It takes the first bucket to have its default size, which `bucket_cap_mb` may be below.
    """
    first = min(getattr(dist, _FIRST_BUCKET), wrapper.bucket_bytes_cap)
    with graphs_by_bucket(True), replaced(dist, _FIRST_BUCKET, first):
        yield


def prepare_backward_after_forward(wrapper: DistributedDataParallel, enabled: bool) -> None:
    """Whether the end of a wrapper's forward prepares the averaging of the gradients of a backward that follows."""
    wrapper.require_backward_grad_sync = enabled


def saved_micro_batches(stage: Any) -> Mapping[int, Any]:
    """What a stage of torch's pipelines keeps for the backwards to come, by micro-batch."""
    return stage.fwd_cache


def end_with_parent(signum: int) -> None:
    """Has the system send this process a signal when the one that started it ends; 0 takes that back. Linux only.

    Source: prctl(2), PR_SET_PDEATHSIG, which torch's own processes ask for at their start.
    """
    set_signal = getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", None)
    if set_signal is not None:
        set_signal(signum)


def refuse_fast_path(attention: nn.Module) -> None:
    """Keeps an `nn.TransformerEncoderLayer` from its kernel over whole weights, which it takes for some attentions."""
    attention._qkv_same_embed_dim = False  # pyright: ignore[reportArgumentType] - not declared
