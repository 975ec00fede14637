"""Writes parts of values in place, as eager does.

In:  `select_scatter`, `slice_scatter`, `index_put`, `scatter`, ... of a computed value whose old elements no later
     operator reads, or only operators that can run before the write
Out: their in-place forms; for a write into a view of a value, such as `x[:, 1][mask] = 0`, the in-place form of the
     innermost write, and `lit_ort.written(value, part)`
Saves a copy of the whole value for each write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from lit_ort._compat.torch_fx import first_argument, strides_of, tree_leaves
from lit_ort._compat.torch_ops import OpOverload
from lit_ort.ops.slices import ADD_SLICES, are_disjoint
from lit_ort.ops.writes import IN_PLACE, WHOLE, WRITTEN
from lit_ort.passes.owners import is_region_output, memory_owner, overwritten, shared_with
from lit_ort.passes.slice_reads import READ_OF, READS, indices_of, nested_write

aten = torch.ops.aten
# Views that can have several elements at one place in memory.
_OVERLAPPING = frozenset({aten.expand.default, aten.unfold.default, aten.as_strided.default})


def write_in_place(module: fx.GraphModule) -> int:
    """Rewrites writes in a graph, in place. Returns the number of values that are no longer copied."""
    writer, fired = _Writer(), 0
    for node in reversed(list(module.graph.nodes)):
        if node.target in IN_PLACE and node.target not in WHOLE and isinstance(node.args[0], fx.Node):
            write = _nested(node)
            fired += writer.write(write) or (len(write) > 1 and writer.write(write[:1]))
    return fired


def _nested(node: fx.Node) -> list[fx.Node]:
    """A write, and the writes into views of its base whose results it copies back, to the innermost."""
    write = [node]
    while (part := nested_write(write[-1])) is not None:
        write.append(part)
    return write


class _Writer:
    """The writes of one graph, which are made in place from the last to the first."""

    def __init__(self) -> None:
        # For each write in place: its base, and the dimension and indices of the slice if they are known.
        self._slices: dict[fx.Node, tuple[fx.Node, tuple[int, range] | None]] = {}

    def write(self, write: Sequence[fx.Node]) -> bool:
        """Makes a write in place, after the operators that read what it overwrites.

        Args:
            write: the write, and the writes into views of its base that it consists of, to the innermost, which is the
                first one in the graph.

        Returns:
            Whether this is possible.
        """
        outer, inner = write[0], write[-1]
        base = first_argument(outer)
        if not _is_own(memory_owner(base)) or _overlaps(base):
            return False
        if strides_of(base.meta["val"]) != strides_of(outer.meta["val"]):
            return False
        indices = indices_of(outer) if outer.target in READ_OF else None
        old = set(_aliases(memory_owner(base), (*write, *self._untouched(outer, indices))))
        others = {argument for node in write for argument in _others(node)} - {*write}
        late = [user for value in old for user in _readers(value) if inner < user and user not in write]
        if not others.isdisjoint(old) or any(overwritten(reader) for reader in late):
            return False
        if late and not _postpone(write, max(late), others):
            return False
        for node in write:
            self._slices[node] = base, indices
            _convert(node, node is inner)
        return True

    def _untouched(self, write: fx.Node, indices: tuple[int, range] | None) -> Iterator[fx.Node]:
        """The slices of a write's base that neither it nor any later write into the same memory changes before they are
        read.
        """
        base = first_argument(write)
        views = [user for user in base.users if user.target in READS and user.args[0] is base]
        if indices is None or not views:
            return
        result = set(_aliases(write))
        for view in views:
            aliases = list(_aliases(view))
            readers = [reader for alias in aliases for reader in _readers(alias)]
            if any(overwritten(alias) is not None for alias in aliases):
                continue
            later = [node for node in result if overwritten(node) is not None and not all(r < node for r in readers)]
            slices = [(base, indices), *(self._slices.get(node, (None, None)) for node in later)]
            if all(_is_apart(view, part) and (of is base or of in result) for of, part in slices):
                yield view


def _postpone(write: Sequence[fx.Node], last: fx.Node, others: Collection[fx.Node]) -> bool:
    """Moves a write, and the views of its result, to the first operator that reads its result.

    Args:
        write: as above.
        last: the last reader of what the write overwrites.
        others: the arguments of the write besides the values that it writes into.

    Returns:
        Whether this is possible: the last reader comes before, and the arguments keep their elements until then.
    """
    views = list(_aliases(write[0], writes=False))
    first = min(user for view in views for user in _readers(view))
    if not last < first:
        return False
    for argument in others:
        owner = memory_owner(argument)
        if any(overwritten(node) and write[-1] < node and node < first for node in _aliases(owner)):
            return False
    for node in (*reversed(write), *(view for view in views[1:] if view < first)):
        first.prepend(node)
    return True


def _is_apart(view: fx.Node, indices: tuple[int, range] | None) -> bool:
    """Whether a slice has none of the indices of another slice of a value of the same shape."""
    own = indices_of(view)
    return own is not None and indices is not None and own[0] == indices[0] and are_disjoint(own[1], indices[1])


def _convert(node: fx.Node, is_innermost: bool) -> None:
    if is_innermost:
        assert isinstance(node.target, OpOverload)
        node.target = IN_PLACE[node.target]
    else:
        node.target, node.args, node.kwargs = WRITTEN, node.args[:2], {}


def _is_own(owner: fx.Node) -> bool:
    """Whether the memory of a value belongs to the graph, and not to an input, a constant or another value."""
    target = owner.target
    if is_region_output(owner):
        return True
    if owner.op != "call_function" or not isinstance(target, OpOverload):
        return False
    # Some of lit_ort's own kernels return an argument as it is.
    return target.namespace == "aten" or target in (IN_PLACE, ADD_SLICES)


def _overlaps(value: fx.Node | None) -> bool:
    """Whether several elements of a value can be at one place in memory."""
    while value is not None:
        if value.target in _OVERLAPPING:
            return True
        value = shared_with(value)
    return False


def _others(node: fx.Node) -> list[fx.Node]:
    leaves = tree_leaves((node.args[1:], node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """The operators that read a value itself, also those that write into it, but no views."""
    return (user for user in value.users if shared_with(user) is not value or overwritten(user) is not None)


def _aliases(value: fx.Node, without: Collection[fx.Node] = (), *, writes: bool = True) -> Iterator[fx.Node]:
    """A value, and the views of it and the results of writes into it, each after the value that it shares memory with.

    Args:
        value: the value.
        without: values that are left out, with their aliases.
        writes: whether the results of writes are not left out.
    """
    pending = [value]
    while pending:
        node = pending.pop()
        yield node
        users = [user for user in node.users if shared_with(user) is node and user not in without]
        pending += [user for user in users if writes or overwritten(user) is None]
