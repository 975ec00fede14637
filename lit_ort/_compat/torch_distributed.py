"""Private interfaces of torch.distributed: DistributedDataParallel, process groups, pipelines, sharded attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.nn.parallel import DistributedDataParallel

from lit_ort._compat.patching import replaced
from lit_ort._compat.torch_dynamo import graphs_by_bucket

_OF_TORCH = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
# The names of this package's collectives end with this.
_OF_RANKS = "_ranks"
_FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this name. A graph can contain the name, but not the group itself."""
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType] - a str to torch before 2.13


def buffer_broadcast(enabled: bool) -> dict[str, bool]:
    """DistributedDataParallel's argument that enables the broadcast of buffers before each forward.

    Torch 2.13 renamed the argument.
    """
    return {"forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers": enabled}


@contextmanager
def graphs_of_buckets(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Makes Dynamo split graphs at the points where the gradients of a bucket are complete.

    Dynamo assumes the default size for the first bucket; this is replaced if `bucket_cap_mb` is smaller.
    """
    first = min(getattr(dist, _FIRST_BUCKET), wrapper.bucket_bytes_cap)
    with graphs_by_bucket(True), replaced(dist, _FIRST_BUCKET, first):
        yield


def prepare_backward_after_forward(wrapper: DistributedDataParallel, enabled: bool) -> None:
    """Sets whether a wrapper's forward prepares the reduction of gradients in the next backward."""
    wrapper.require_backward_grad_sync = enabled


def has_collectives(graph: fx.Graph) -> bool:
    """Whether a graph waits for other processes."""
    names = (n.target._schema.name for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return any(name.startswith(_OF_TORCH) or name.endswith(_OF_RANKS) for name in names)


def saved_micro_batches(stage: Any) -> Mapping[int, Any]:
    """The values that a stage of torch's pipelines saves for the backward, by micro-batch."""
    # Since torch 2.15 under another name.
    return stage._forward_chunk_states if hasattr(stage, "_forward_chunk_states") else stage.fwd_cache


def end_with_parent(signum: int) -> None:
    """Sets the signal that the kernel sends to this process when its parent process ends; 0 disables it. Linux only.

    Source: prctl(2), PR_SET_PDEATHSIG, which torch's own worker processes set at their start.
    """
    set_signal = getattr(torch.multiprocessing, "_prctl_pr_set_pdeathsig", None)
    if set_signal is not None:
        set_signal(signum)


def refuse_fast_path(attention: nn.Module) -> None:
    """Disables the fused inference kernel of `nn.TransformerEncoderLayer`, which needs unsharded attention weights."""
    attention._qkv_same_embed_dim = False  # pyright: ignore[reportArgumentType] - not declared
