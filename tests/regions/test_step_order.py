"""The order of steps that are joined: right after each change, and a circle is seen before it is made."""

from __future__ import annotations

import random

import networkx
import pytest

from lit_ort.regions.step_order import StepOrder


class Step:
    """A step with the steps that it needs."""

    def __init__(self, needs: set[Step]) -> None:
        self.needs = needs


def is_in_order(order: StepOrder[Step], steps: list[Step]) -> bool:
    # A need of the first is later only if the order is wrong: `later` looks at what comes after.
    return all(order.later(need, [step]) is None for step in steps for need in step.needs)


def depends(steps: list[Step], step: Step, on: Step) -> bool:
    graph = networkx.DiGraph([(one, need) for one in steps for need in one.needs])
    return step is on or (step in graph and on in graph and networkx.has_path(graph, step, on))


@pytest.mark.parametrize("seed", range(20))
def test_steps_join_unless_a_third_one_is_between(seed: int) -> None:
    draw = random.Random(seed)
    order, steps = StepOrder[Step](lambda step: step.needs), list[Step]()
    for _ in range(60):
        needs = set(draw.sample(steps, min(len(steps), draw.randrange(4))))
        joined = draw.choice(steps) if steps and draw.random() < 0.5 else None
        if joined is None:
            steps.append(Step(needs))
            order.append(steps[-1])
            continue
        needs.discard(joined)
        later = order.later(joined, needs)
        assert (later is None) == any(depends(steps, need, joined) for need in needs)
        if later is not None:
            order.move(later, joined)
            joined.needs |= needs
        assert is_in_order(order, steps)


@pytest.mark.parametrize("seed", range(20))
def test_two_steps_become_one_unless_a_third_one_is_between(seed: int) -> None:
    draw = random.Random(seed)
    order, steps = StepOrder[Step](lambda step: step.needs), list[Step]()
    for _ in range(40):
        steps.append(Step(set(draw.sample(steps, min(len(steps), draw.randrange(3))))))
        order.append(steps[-1])
    while pairs := [(need, step) for step in steps for need in step.needs]:
        first, second = draw.choice(pairs)
        needs = (first.needs | second.needs) - {first, second}
        later = order.later(first, needs)
        assert (later is None) == any(depends(steps, need, first) for need in needs)
        if later is None:
            second.needs.discard(first)
            continue
        order.move(later, first)
        joined = Step(needs)
        order.replace(first, second, joined)
        steps = [step for step in steps if step not in (first, second)] + [joined]
        for step in steps:
            if step.needs & {first, second}:
                step.needs = (step.needs - {first, second}) | {joined}
        assert is_in_order(order, steps)
