"""`strategy="ort_ddp"`: several processes, each with its part of a batch, average their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from lit_ort._compat.torch_distributed import buffer_broadcast, graphs_of_buckets, prepare_backward_after_forward
from lit_ort._compat.torch_dynamo import graphs_by_bucket
from lit_ort.distributed.adasum import AdaSum, adasum_hook, require_power_of_two
from lit_ort.errors import OptionsError, UnsupportedError
from lit_ort.options import require_bool
from lit_ort.strategies.arguments import Compile, ProcessArguments
from lit_ort.strategies.either_package import EitherDDPStrategy
from lit_ort.strategies.processes import ProcessesMixin


class ORTDDPStrategy(ProcessesMixin, EitherDDPStrategy):
    """Trains one module in several processes through ONNX Runtime, each with its part of a batch.

    torch's DistributedDataParallel averages gradients over gloo. Dropout differs between ranks; all other randomness,
    data order included, is that of Lightning's DDPStrategy.

    Raises:
        OptionsError: an invalid value.
        UnsupportedError: an unsupported setting: another accelerator, SyncBatchNorm, AdaSum with three ranks ...
        RankError: a process could not join the others.
    """

    strategy_name = "ort_ddp"

    def __init__(
        self,
        *,
        overlap: bool = False,
        adasum: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        skip_all_reduce_unused_params: bool = False,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        compile: Compile | None = None,
        **arguments: Unpack[ProcessArguments],
    ) -> None:
        """Takes options of the engine and arguments of Lightning's strategy.

        Args:
            overlap: split each step's graph where DistributedDataParallel's buckets end (`bucket_cap_mb`), so that
                gradients are reduced during the backward. Off: one graph per step, and gradients are reduced after it.
            adasum: combine gradients by AdaSum instead of averaging them; the number of ranks must be a power of two.
            find_unused_parameters: allow steps that don't use all parameters.
            gradient_as_bucket_view: gradients are views of DistributedDataParallel's buckets instead of copies.
            bucket_cap_mb: the size of a bucket, in MiB; None uses torch's.
            static_graph: declare that every step uses the same parameters in the same way.
            broadcast_buffers: every forward uses the buffers of rank 0 (torch's `forward_sync_buffers` since 2.13).
            init_sync: all ranks start with the parameters of rank 0.
            skip_all_reduce_unused_params: don't reduce unused parameters, which must be the same ones on all ranks.
            ddp_comm_state: the state that is passed to the communication hook.
            ddp_comm_hook: combines the gradients of a bucket instead of the average.
            ddp_comm_wrapper: wraps the hook.
            model_averaging_period: steps between averages of the weights, with torch's post-local SGD hook.
            compile: when steps are compiled. "auto": each step begins in eager and is timed; it is compiled when what
                is left of the run makes that worth its time, and stays compiled if it is faster. "always": at its first
                call. "never". None is the environment variable LIT_ORT_COMPILE, or "auto".
            arguments: those of `lit_ort.ORTOptions` but `optimizer_in_graph`, `fused_optimizer`, and those of
                Lightning's `DDPStrategy` about processes: see `lit_ort.strategies.arguments.ProcessArguments`.
        """
        require_bool("overlap", overlap)
        require_bool("adasum", adasum)
        if adasum and ddp_comm_hook is not None:
            raise OptionsError("adasum=True sets a ddp_comm_hook, and another one is passed. Leave one of them out.")
        self._overlap = overlap
        self._adasum = adasum
        self._is_static = static_graph
        self._hook = (ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        super().__init__(
            arguments,
            compile=compile,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            init_sync=init_sync,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            **buffer_broadcast(broadcast_buffers),
        )

    def setup_distributed(self) -> None:
        if self._adasum:
            require_power_of_two(self.num_nodes * self.num_processes)
        super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        if self._is_static and trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"static_graph=True with accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "DistributedDataParallel does not support this, in eager either. Leave static_graph out."
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        # Lightning registers communication hooks for CUDA only.
        hook, state, wrapper = (adasum_hook, AdaSum(), None) if self._adasum else self._hook
        if hook is not None:
            model: Any = self.model
            model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    # A step goes through DistributedDataParallel's forward, which prepares the averaging of gradients.

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        module, wrapper = self.lightning_module, self.model
        if not isinstance(wrapper, DistributedDataParallel):
            return super()._run(step, *args, **kwargs)
        is_manual = not module.automatic_optimization
        run = super()._run

        own = {name: value for name, value in module.__dict__.items() if name == "forward"}

        def forward(*args: Any, **kwargs: Any) -> Any:
            _restore_forward(module, own)
            with graphs_of_buckets(wrapper) if self._overlap else graphs_by_bucket(False):
                result = run(step, *args, **kwargs)
            if is_manual:  # manual_backward prepares the reduction
                prepare_backward_after_forward(wrapper, False)
            return result

        module.__dict__["forward"] = forward
        try:
            return wrapper(*args, **kwargs)
        finally:
            _restore_forward(module, own)
            if is_manual:
                prepare_backward_after_forward(wrapper, True)


def _restore_forward(module: Any, own: Mapping[str, Any]) -> None:
    """Gives a module back its own attribute `forward`, or none."""
    module.__dict__.pop("forward", None)
    module.__dict__.update(own)
