"""An executor that computes nothing and says how long it would have taken."""

from __future__ import annotations

from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import StepPlan, StepResult
from chairlift.scheduling.work import step_work
from chairlift.simulate.cost import StepCost

TOKEN_ID = 0  # which token is sampled makes no difference: lengths are forced


class SimulatedExecutor:
    """Takes any scheduler's plans, unchanged. See :class:`chairlift.engine.executor.Executor`.

    Args:
        capacity: what the simulated device holds.
        cost: how long a step takes.
    """

    def __init__(self, capacity: Capacity, cost: StepCost) -> None:
        self._capacity = capacity
        self._cost = cost

    def capacity(self) -> Capacity:
        """What the simulated device holds."""
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Returns as many tokens as are sampled, and the step's time."""
        work = step_work(plan)
        return StepResult([TOKEN_ID] * work.sampled, self._cost.seconds(work))

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
