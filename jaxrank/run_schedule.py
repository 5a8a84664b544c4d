"""When a run evaluates, saves and logs, in steps."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

# As data.valid: each day is evaluated before it is trained on; see `days`.
NEXT_DAY = "next_day"


class RunSchedule(NamedTuple):
    """When things happen, in steps.

    valid: the split that is evaluated at intervals and at the end; empty: none.
    next_days: by step, the days that are evaluated after it, in progressive validation.
    """

    num_steps: int
    eval_every: int
    save_every: int
    log_every: int
    valid: str
    next_days: Mapping[int, str]

    def evaluated(self, step: int) -> str:
        """The name of the split that is evaluated after a step; empty: none is."""
        due = step == self.num_steps or step % self.eval_every == 0
        return self.next_days.get(step, self.valid if due else "")


def make_run_schedule(
    *,
    rows: int,
    batch_size: int,
    steps_per_execution: int,
    num_steps: int,
    num_epochs: float,
    log_every_steps: int,
    eval_every_steps: int,
    save_every_steps: int,
    valid: str,
    order: str,
) -> RunSchedule:
    """Turns epochs into steps, of whole executions, which intervals are too; see
    `Config.check_run`.

    Up to the next execution; where days are trained in turn, down to the last.

    Args:
        rows: examples of the training split.
        valid, order: fields of `config.data`.
        Others: fields of the config, where 0 is for none or for what follows from the others.
    """
    epoch = Fraction(rows, batch_size)

    def whole_executions(steps: Fraction, whole: Callable[[Fraction], int] = math.ceil) -> int:
        return max(1, whole(steps / steps_per_execution)) * steps_per_execution

    # Days in turn would end with the first day again: what is left of the last one is left out.
    rounded = math.floor if order == "days" else math.ceil
    num_steps = num_steps or whole_executions(_as_written(num_epochs) * epoch, rounded)
    eval_every = eval_every_steps or min(whole_executions(epoch), num_steps)
    save_every = save_every_steps or eval_every
    valid = "" if valid == NEXT_DAY else valid
    return RunSchedule(num_steps, eval_every, save_every, log_every_steps, valid, {})


def _as_written(number: float) -> Fraction:
    """0.07 is 7 of 100, not a little more, of which the last step would be made."""
    return Fraction(repr(float(number)))  # of NumPy, too
