"""`strategy="ort_ddp"`: several processes, each with its part of a batch; gradients are averaged between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lit_ort._compat.torch_distributed import buffer_broadcast, graphs_of_buckets, prepare_backward_after_forward
from lit_ort._compat.torch_dynamo import graphs_by_bucket
from lit_ort.distributed.adasum import AdaSum, adasum_hook, require_power_of_two
from lit_ort.errors import OptionsError, UnsupportedError
from lit_ort.options import ORTOptions, require_bool
from lit_ort.strategies.arguments import TIMEOUT, Dynamic, EngineName, Fallback, Precision, Recompute, StartMethod
from lit_ort.strategies.processes import ProcessesMixin


class DDPMixin(ProcessesMixin):
    """Everything of `ORTDDPStrategy` but the package of Lightning's that it comes on."""

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
        precision: Precision = "32-true",
        fallback: Fallback = "warn",
        verify_first_step: bool = False,
        verify_every_n_steps: int | None = None,
        verify_tolerance: float = 1e-4,
        recompute: Recompute | None = None,
        dynamic: Dynamic = "auto",
        disable_passes: Sequence[str] = (),
        dump_dir: str | None = None,
        cache_dir: str | None = None,
        threads: int | None = None,
        allow_spinning: bool = False,
        engine: EngineName = "auto",
        keep_memory: bool = True,
        timeout: timedelta | None = TIMEOUT,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: PrecisionPlugin | None = None,
    ) -> None:
        """`lit_ort.ORTOptions` says more about the arguments from `precision` to `keep_memory`.

        Args:
            overlap: cut each step's graph where DistributedDataParallel's buckets end (`bucket_cap_mb`), so that
                gradients travel during the backward. Off: one graph a step, whose gradients travel after it.
            adasum: combine gradients by AdaSum instead of averaging them, for a power of two of ranks.
            find_unused_parameters: a step may leave parameters without a gradient.
            gradient_as_bucket_view: gradients lie in DistributedDataParallel's buckets instead of beside them.
            bucket_cap_mb: the size of a bucket, MiB; None takes torch's.
            static_graph: every step uses the same parameters, in the same way.
            broadcast_buffers: every forward takes the buffers of rank 0 (torch's `forward_sync_buffers` since 2.13).
            init_sync: all ranks begin with the parameters of rank 0.
            skip_all_reduce_unused_params: unused parameters, the same ones on all ranks, don't travel.
            ddp_comm_state: what a communication hook gets beside a bucket.
            ddp_comm_hook: what combines the gradients of a bucket instead of the average.
            ddp_comm_wrapper: wraps the hook.
            model_averaging_period: steps between averages of the weights, with torch's post-local SGD hook.
            precision: what products and attention compute in; the Trainer's precision goes before it.
            fallback: a graph that can't run through ONNX Runtime runs in PyTorch with a warning, or is an error.
            verify_first_step: compare each graph's first run with eager, dropout off.
            verify_every_n_steps: the same at the first and every n-th run.
            verify_tolerance: the largest relative error that verification accepts.
            recompute: "layers" keeps less of each layer and computes the rest again in the backward; a float of 0 to 1
                is the share of activation memory to keep.
            dynamic: one graph for all sizes from the second one on, or one for each size.
            disable_passes: names of graph passes to leave out.
            dump_dir: folder that receives the ONNX file of every stage of every graph.
            cache_dir: folder that keeps compiled graphs for later runs.
            threads: of a session's operators; None takes torch's number.
            allow_spinning: let idle session threads spin.
            engine: which build of ONNX Runtime runs sessions, `training`, `stock`, or the one that is installed.
            keep_memory: let the C library keep freed memory for the next step.
            timeout: after which a process that waits for another one gives up.
            process_group_backend: of torch.distributed; None takes gloo.
            start_method: how Lightning starts the processes; "popen" runs the script again.
            accelerator: as in Lightning's `DDPStrategy`; the CPU's.
            parallel_devices: as in Lightning's `DDPStrategy`, which sets them from the Trainer's devices.
            cluster_environment: as in Lightning's `DDPStrategy`; what says which ranks there are.
            checkpoint_io: as in Lightning's `DDPStrategy`.
            precision_plugin: as in Lightning's `DDPStrategy`, for one of the precisions above.
        """
        require_bool("overlap", overlap)
        require_bool("adasum", adasum)
        if adasum and ddp_comm_hook is not None:
            raise OptionsError("adasum=True is a ddp_comm_hook, and another one is given. Leave one of them out.")
        self._overlap = overlap
        self._adasum = adasum
        self._is_static = static_graph
        self._hook = (ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        super().__init__(
            ORTOptions(
                precision=precision,
                fallback=fallback,
                verify_first_step=verify_first_step,
                verify_every_n_steps=verify_every_n_steps,
                verify_tolerance=verify_tolerance,
                recompute=recompute,
                dynamic=dynamic,
                disable_passes=disable_passes,  # pyright: ignore[reportArgumentType] - becomes a tuple there
                dump_dir=dump_dir,
                cache_dir=cache_dir,
                threads=threads,
                allow_spinning=allow_spinning,
                engine=engine,
                keep_memory=keep_memory,
            ),
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
            timeout=timeout,
            process_group_backend=process_group_backend,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def setup_distributed(self) -> None:
        if self._adasum:
            require_power_of_two(self.num_nodes * self.num_processes)
        super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        if self._is_static and trainer.accumulate_grad_batches != 1:
            raise UnsupportedError(
                f"static_graph=True with accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "DistributedDataParallel fails there, in eager too. Leave static_graph out."
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        # Lightning registers hooks for CUDA only.
        hook, state, wrapper = (adasum_hook, AdaSum(), None) if self._adasum else self._hook
        if hook is not None:
            self.model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    # A step goes through DistributedDataParallel's forward, which prepares the averaging of gradients.

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        module, wrapper = self.lightning_module, self.model
        if not isinstance(wrapper, DistributedDataParallel):
            return super()._run(step, *args, **kwargs)
        is_manual = not module.automatic_optimization
        run = super()._run

        def forward(*args: Any, **kwargs: Any) -> Any:
            del module.__dict__["forward"]
            with graphs_of_buckets(wrapper) if self._overlap else graphs_by_bucket(False):
                result = run(step, *args, **kwargs)
            if is_manual:  # manual_backward prepares it instead
                prepare_backward_after_forward(wrapper, False)
            return result

        module.__dict__["forward"] = forward
        try:
            return wrapper(*args, **kwargs)
        finally:
            module.__dict__.pop("forward", None)
            if is_manual:
                prepare_backward_after_forward(wrapper, True)


class ORTDDPStrategy(DDPMixin, DDPStrategy):
    """Trains one module in several processes through ONNX Runtime, each with its part of a batch.

    Gradients are averaged by torch's DistributedDataParallel over gloo. Dropout differs between ranks; what else is
    random, data order too, follows Lightning's DDPStrategy.

    Raises:
        OptionsError: a value outside its rule.
        UnsupportedError: what isn't served: another accelerator, SyncBatchNorm, AdaSum over three ranks ...
        RankError: a process that could not join the others.
    """
