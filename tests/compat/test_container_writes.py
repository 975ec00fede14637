"""Steps that write into containers of the module, of other objects and of callbacks.

They need no graph for each length, and end with the contents that they have in eager.
"""

from __future__ import annotations

import collections
import linecache
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lit_ort.backend.explanation import CompileLog
from lit_ort.backend.tracing_settings import dynamo_settings
from tests.compat.canary import canary

STEPS = 12
# What each object of a case has.
STATE: dict[str, Any] = {
    "outputs": list,
    "other": list,
    "options": dict,
    "pairs": tuple,
    "text": str,
    "queue": collections.deque,
    "latest": lambda: collections.deque(maxlen=3),
    "seen": set,
    "by_step": dict,
    "ordered": collections.OrderedDict,
    "history": lambda: {"loss": []},
    "lists": lambda: collections.defaultdict(list),
    "counts": collections.Counter,
    "number": int,
    "mean": float,
}
# Statements of a step in which `o` is the object, `x` float[4, 3] and `i` the step's index.
ONE_GRAPH = {
    "append": "o.outputs.append(loss.detach())",
    "append of a dictionary": "o.outputs.append({'loss': loss.detach(), 'rows': len(x)})",
    "append of a list that changes": "e = [1]; o.outputs.append(e); e.append(loss.detach())",
    "append of a batch": "o.outputs.append(x)",
    "append of a read value": "o.outputs.append(loss.item())",
    "append in a loop": "for k in range(3): o.outputs.append(loss.detach() * k)",
    "append without gradients": "with torch.no_grad(): o.outputs.append(self.net(x))",
    "append through a variable": "a = o.outputs.append; a(1); a(loss.detach())",
    "append of a number, then its change": "o.outputs.append(o.number); o.number = 7",
    "append to a list in a dictionary": "o.history['loss'].append(loss.detach())",
    "extend": "o.outputs.extend([loss.detach(), i])",
    "extend by a list that changes": "e = [1]; o.outputs.extend(e); e.append(2); o.outputs.extend(e)",
    "extend by a range": "o.outputs.extend(range(3)); o.outputs += range(1, 6, 2); o.seen.update(range(4))",
    "booleans": "b = collections.defaultdict(bool); o.outputs.append((bool(), b['a']))",
    "+=": "o.outputs += [loss.detach()]",
    "insert": "o.outputs.insert(0, loss.detach())",
    "clear": "o.outputs.clear(); o.outputs.append(i)",
    "replaced": "o.outputs.append(i); o.outputs = []; o.outputs.append(loss.detach())",
    "read behind a graph break": "o.outputs.append(i); torch._dynamo.graph_break(); o.mean = total(o.outputs)",
    "deque": "o.queue.append(loss.detach()); o.queue.appendleft(i); o.queue.extend((1, 2))",
    "deque with a limit": "o.latest.append(loss.detach())",
    "set": "o.seen.add(i)",
    "item": "o.by_step[i] = loss.detach()",
    "item, constant": "o.by_step['loss'] = loss.detach()",
    "item of an ordered dictionary": "o.ordered[i] = loss.detach()",
    "extend by a list of another": "o.outputs.extend(o.other); o.options.update(o.by_step); o.other.append(i)",
    "extend by read values": "o.outputs += x[:, 0].tolist()",
    "append through a local list": "a = o.outputs; v = loss.item(); a.append(v)",
    "setdefault without its result": "o.by_step.setdefault(i, loss.detach())",
}
FEW_GRAPHS = {
    "nested containers": "o.by_step[i] = {'losses': [loss.detach(), (i, 'a')]}",
    "append of an object": "o.outputs.append(Pair(loss.detach(), i))",
    "update": "o.by_step.update({'a': loss.detach()}); o.by_step.update(b=i)",
    "setdefault": "o.by_step.setdefault('a', []).append(loss.detach())",
    "lists by name": "o.lists['a'].append(loss.detach())",
    "counts": "o.counts['a'] += 1; o.counts.update(['a', 'b'])",
    "int": "o.number += len(x)",
    "float": "o.mean = 0.9 * o.mean + 0.1 * i",
    "extend by a generator": "o.outputs.extend(k * i for k in range(2))",
    "branch": "if o.outputs: o.outputs.append(1)\n        else: o.outputs.append(2)",
    "truth": "o.number += bool(o.seen) + (not o.queue) + (1 if o.latest else 2); o.seen.add(i); o.latest.append(i)",
    "lengths": "o.number = len(o.seen) + len(o.queue) + len(o.ordered); o.seen.add(i); o.ordered[i] = 1",
    "length": "o.outputs.append(i); o.number = len(o.outputs); o.outputs.extend([1, 2]); o.mean = len(o.outputs) / 2",
    "the first few": "if len(o.outputs) < 4: o.outputs.append(loss.detach())",
    "cleared when full": "o.outputs.append(i)\n        if len(o.outputs) > 3: o.outputs.clear()",
    "one of two": "(o.outputs if i % 2 else o.queue).append(loss.detach())",
    "in a checkpoint": "loss = checkpoint(lambda y: (o.outputs.append(1), y * 2)[1], loss, use_reentrant=False)",
}
# These read what they write, and are compiled for some lengths; then the statement runs outside of graphs.
READS = {
    "sum": "o.outputs.append(i); o.mean = sum(o.outputs)",
    "moved": "a = o.outputs; o.outputs = []; o.outputs.append(i); a.append(7); o.outputs = a; o.outputs += [3]",
    "values counted": "o.outputs += x[:, 0].tolist(); o.counts.update(x.argmax(1).tolist())",
    "length of another": "o.other.append(i); o.outputs.append(len(o.other)); loss = loss.exp()",
    "sum in a function": "o.outputs.append(i); o.mean = total_of(o)",
    "last": "o.outputs.append(i); o.mean = o.outputs[-1] + len(o.outputs)",
    "stack": "o.outputs.append(loss.detach()); o.mean = torch.stack(o.outputs).mean()",
    "slice": "o.outputs.append(i); o.outputs[:] = o.outputs[-3:]",
    "loop": "o.outputs.append(i)\n        for v in o.outputs: o.mean += v",
    "loop that comes first": "loss = self.net(x).sum() + sum([v for v in o.outputs]); o.outputs.append(i)",
    "new list": "o.outputs = o.outputs + [loss.detach()]",
    "new tuple": "o.pairs += (loss.detach(),)",
    "text": "o.text += 'a'; o.number = len(o.text)",
    "joined text": "o.text = ','.join([o.text, 'a'])",
    "alias that is read": "o.outputs.append(i); o.number = len(o.alias); o.mean = sum(o.alias); o.alias.append(7)",
    "alias that is read first": "o.mean = sum(o.alias); o.outputs.append(i); o.alias.append(7); o.n = sum(o.outputs)",
    "list that is read after extend": "o.outputs.extend(o.other); o.other.append(i); o.mean = sum(o.other)",
    "list that is extended by itself": "o.outputs.append(i); o.outputs = o.outputs[:4]; o.outputs.extend(o.outputs)",
    "item that is read": "o.by_step[i] = i; o.mean = o.by_step[i] + len(o.by_step)",
    "item by a key that changes": "o.by_step.update({i: loss.detach()})",
    "count by a key that changes": "o.counts[i] += 1",
    "list by a key that changes": "o.lists[i].append(loss.detach())",
    "key that is looked for": "if i not in o.seen: o.seen.add(i)",
    "oldest": "o.queue.append(i)\n        if len(o.queue) > 3: o.queue.popleft()",
}
# A graph can't end here, and an error is the alternative.
IN_BLOCKS = {
    "error that is caught": "try: o.outputs.append(i); o.outputs.remove(99)\n        except ValueError: o.number += 1",
    "in a loop": "o.outputs.append(i)\n        for k in range(2): o.mean = sum(o.outputs)",
}
OWNERS = {"module": "self", "object": "self.helper", "callback": "self.callbacks[0]"}


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Owner:
    pass


@torch.compiler.disable
def total(values: list[int]) -> int:
    return sum(values)


def total_of(owner: Any) -> int:
    return sum(owner.outputs)


class Module(nn.Module):
    step: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.helper, self.callbacks = Owner(), [Owner()]
        for owner in (self, self.helper, self.callbacks[0]):
            for name, make in STATE.items():
                setattr(owner, name, make())
            owner.alias = owner.outputs  # pyright: ignore[reportAttributeAccessIssue]


def module_of(name: str, owner: str, statements: str) -> type[Module]:
    """A class whose step has these statements."""
    source = f"def step(self, x, i):\n        o = {owner}\n        loss = self.net(x).square().mean()\n"
    source += f"        {statements}\n        return loss\n"
    file = f"<{name} of {owner}>"
    # Torch reads the lines of code that it traces.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {
        "torch": torch,
        "total": total,
        "total_of": total_of,
        "Pair": Pair,
        "checkpoint": checkpoint,
        "collections": collections,
    }
    exec(compile(source, file, "exec"), names)
    return type("Written", (Module,), {"step": names["step"]})


def plain(value: Any) -> Any:
    """A value that can be compared by ==."""
    if isinstance(value, torch.Tensor):
        return [round(element, 4) for element in value.flatten().tolist()]
    if isinstance(value, Pair):
        return plain((value.first, value.second))
    if isinstance(value, dict):
        return type(value).__name__, [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [plain(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def contents(owner: Any) -> dict[str, Any]:
    return {name: plain(getattr(owner, name)) for name in STATE}


def graphs_of(name: str, owner: str, statements: str) -> int:
    """Runs the steps in eager and compiled, requires the same contents, and returns the number of graphs."""
    kind = module_of(name, OWNERS[owner], statements)
    eager, module, counter = kind(), kind(), CompileCounter()
    step = torch.compile(module.step, backend=counter)
    for i in range(STEPS):
        x = torch.randn(4, 3)
        expected = eager.step(x, i)
        with dynamo_settings("step", strict=True):
            torch.testing.assert_close(step(x, i), expected)
        assert contents(eval(OWNERS[owner], {"self": module})) == contents(eval(OWNERS[owner], {"self": eager}))
    return counter.frame_count


# One of nine cases is fast, one is slow.
MARKS = {0: (), 4: pytest.mark.slow}
CASES = [
    pytest.param(name, owner, most, id=f"{name}, {owner}", marks=MARKS.get(k % 9, pytest.mark.sweep))
    for cases, most in ((ONE_GRAPH, 1), (FEW_GRAPHS, 4), (READS, 9), (IN_BLOCKS, STEPS))
    for k, (name, owner) in enumerate((name, owner) for name in cases for owner in OWNERS)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "owner", "most"), CASES)
def test_contents_and_graphs(name: str, owner: str, most: int) -> None:
    effect = "a step that appends to a list of its module is compiled at every call"
    with canary("LazyVariableTracker or SideEffects of torch._dynamo", "container_writes", effect):
        torch.compiler.reset()
        assert graphs_of(name, owner, {**ONE_GRAPH, **FEW_GRAPHS, **READS, **IN_BLOCKS}[name]) <= most


def test_the_statement_that_ends_a_graph_is_reported_once() -> None:
    torch.compiler.reset()
    log, module = CompileLog(), module_of("reported", "self", READS["sum"])()
    step = torch.compile(module.step, backend="eager")
    for i in range(STEPS):
        with dynamo_settings("step", strict=False, compile_log=log):
            step(torch.randn(4, 3), i)
    reason = (
        "graph break in step at <reported of self>:4: `self.outputs` changes at each call. Read it in a hook such as"
    )
    assert [str(graph_break).startswith(reason) for graph_break in log.breaks] == [True]


def test_a_loop_that_reads_changing_contents_runs_in_eager_with_one_warning() -> None:
    torch.compiler.reset()
    log, module = CompileLog(), module_of("warned", "self", IN_BLOCKS["in a loop"])()
    step = torch.compile(module.step, backend=(counter := CompileCounter()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(STEPS):
            with dynamo_settings("step", strict=False, compile_log=log):
                step(torch.randn(4, 3), i)
    assert [str(warning.message).partition(" Read it")[0] for warning in caught] == [
        "step runs in eager PyTorch: `self.outputs` changes at each call."
    ]
    assert counter.frame_count < 9
    assert module.mean == sum(range(STEPS))


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[Any, int] = {}
        self.seen: set[Any] = set()

    def step(self, x: torch.Tensor, key: Any) -> torch.Tensor:
        try:
            self.by_step[key] = 1
            self.seen.add(key)
        except TypeError:
            self.by_step[tuple(key)] = 2
        return x.sum()


def test_an_error_of_a_write_reaches_the_programs_handler() -> None:
    torch.compiler.reset()
    module, eager = Keyed(), Keyed()
    compiled = torch.compile(module.step, backend=CompileCounter())
    for key in ((1,), [1], [2], (3,)):
        with dynamo_settings("step", strict=False):
            compiled(torch.ones(2), key)
        eager.step(torch.ones(2), key)
    assert (module.by_step, module.seen) == (eager.by_step, eager.seen)
