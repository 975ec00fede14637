"""A phase whose session calls no Python, with the sizes of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lit_ort.errors import KernelError, SessionError
from lit_ort.regions.placed_region import from_json
from lit_ort.runtime.engines.engine_interface import Engine, LocationOf
from lit_ort.runtime.latest import MOST_SIZES, Latest
from lit_ort.runtime.nodes import NodeFunction, RunState
from lit_ort.runtime.offsets import offsets_of
from lit_ort.runtime.program import CALLER, OPENMP, Phase
from lit_ort.runtime.region_calls import kernels
from lit_ort.runtime.sizes import Shapes, inputs_in, values_of

if TYPE_CHECKING:
    from lit_ort.runtime.engines.native_sessions import RunShapes

_COMPILE_AGAIN = "Compile the graph again."


class NativePhase:
    """The session of a phase.

    Args:
        phase: of a native session.
        engine: creates the session.
        threads: its intra-op threads, unless it is for one.
        nodes: the functions of its torch nodes.
        location_of: returns the location of an error in a torch node, for messages.

    Raises:
        SessionError: ONNX Runtime rejects the model, a region has no code, or this build has no such sessions.
    """

    def __init__(
        self,
        phase: Phase,
        engine: Engine,
        threads: int,
        nodes: Sequence[NodeFunction] = (),
        location_of: LocationOf = lambda position, error: str(position),
    ) -> None:
        native = engine.native
        if native is None:
            raise SessionError("this build has no native sessions", remedy=_COMPILE_AGAIN)
        from lit_ort.runtime.engines.native_sessions import NativeModel, NativeRegion  # loads LLVM

        try:
            placed = [from_json(region.text) for region in phase.regions]
            made = kernels().kernels(one.region for one in placed)
        except (KernelError, ValueError) as error:
            raise SessionError(f"a region has no code: {error}", remedy=_COMPILE_AGAIN) from error
        modules = [region.module for region in phase.regions]
        regions = [NativeRegion(*parts) for parts in zip(placed, made, modules, strict=True)]
        numbers = [*(node.sizes for node in phase.kernels), *(result.shape for result in phase.results)]
        numbers += [phase.sizes, *(value.shape for value in phase.placed)]
        self._sized_inputs = inputs_in(term for terms in numbers for term in terms)
        names = [name for name, _ in phase.inputs]
        uses_openmp = phase.pool == OPENMP
        if uses_openmp and not native.uses_openmp:
            raise SessionError("torch has no OpenMP here", remedy=_COMPILE_AGAIN)
        model = NativeModel(
            phase.model,
            nodes,
            location_of,
            names,
            (*phase.outputs, *(value.name for value in phase.placed if value.name not in phase.outputs)),
            regions=regions,
            matmuls=phase.matmuls,
            loops=phase.loops,
            losses=phase.losses,
            groups=phase.groups,
            convolutions=phase.convolutions,
            results=len(phase.results),
            has_sizes=bool(self._sized_inputs),
            uses_openmp=uses_openmp,
        )
        try:
            self._phase, self._session = phase, native.session(model, 1 if phase.pool == CALLER else threads)
        except ValueError as error:
            raise SessionError(f"the arguments of a region are not valid: {error}", remedy=_COMPILE_AGAIN) from error
        self._shapes: Latest[tuple[Sequence[int], ...], RunShapes] = Latest(MOST_SIZES)

    def run(self, tensors: Sequence[torch.Tensor], shapes: Shapes, state: RunState) -> list[torch.Tensor]:
        """Runs the session and returns its outputs, in order.

        Raises:
            SessionError: a kernel rejected its inputs.
        """
        key = tuple([shapes[k] for k in self._sized_inputs])
        sizes = self._shapes.get(key)
        if sizes is None:
            sizes = self._shapes[key] = self._shapes_of(shapes)
        return self._session.run(tensors, sizes, state)

    def _shapes_of(self, shapes: Shapes) -> RunShapes:
        from lit_ort.runtime.engines.native_sessions import RunShapes

        def numbers(terms: Sequence[object]) -> tuple[int, ...]:
            return tuple(values_of(terms, shapes))

        phase = self._phase
        outputs = [(one.dtype, numbers(one.shape), numbers(one.computed_shape)) for one in phase.results]
        shapes_of_placed = [numbers(value.shape) for value in phase.placed]
        # A value in the memory of another one takes no bytes of its own.
        uses = [
            (value.first, value.last, math.prod(shape) * value.dtype.itemsize if value.owner is None else 0)
            for value, shape in zip(phase.placed, shapes_of_placed, strict=True)
        ]
        offsets, size = offsets_of(uses)
        places = dict[int, int]()
        for value, shape, offset in zip(phase.placed, shapes_of_placed, offsets, strict=True):
            offset = offset if value.owner is None else offsets[value.owner]
            if value.name in phase.outputs:
                places[phase.outputs.index(value.name)] = offset
            else:
                places[len(outputs)] = offset
                outputs.append((value.dtype, shape, shape))
        return RunShapes(
            tuple(numbers(node.sizes) for node in phase.kernels),
            tuple(outputs),
            places,
            size,
        )
