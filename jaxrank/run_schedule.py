"""The steps at which a run evaluates, saves and logs."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from jaxrank.errors import InputError

_MAX_STEPS = 2**31 - 1  # steps are int32
# Value of data.valid: each day is evaluated before it is trained on; see `days`.
NEXT_DAY = "next_day"


class RunSchedule(NamedTuple):
    """Intervals and length of a run, in steps.

    valid: the split that is evaluated at intervals and at the end; empty: none.
    next_days: {step: the day that is evaluated after it}, in progressive validation.
    """

    num_steps: int
    eval_every: int
    save_every: int
    log_every: int
    valid: str
    next_days: Mapping[int, str]

    def evaluated(self, step: int) -> str:
        """Returns the name of the split that is evaluated after a step; empty: none."""
        due = step == self.num_steps or step % self.eval_every == 0
        return self.next_days.get(step, self.valid if due else "")


def execution_end(step: int, num_steps: int, steps_per_execution: int) -> int:
    """Returns the last step of the execution that starts after `step`.

    Executions end at multiples of `steps_per_execution`, and the last one at `num_steps`. The last
    execution may be shorter, and so may the first one after a resume between two multiples.
    """
    return min(num_steps, (step // steps_per_execution + 1) * steps_per_execution)


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
    """Converts epochs to steps and rounds up. If days are trained in order, it rounds down.

    The last batch of an epoch is completed from the next epoch. Intervals are whole executions; see
    `Config.check_run`.

    Args:
        rows: examples of the training split.
        valid, order: fields of `config.data`.
        Others: fields of the config, where 0 is for none or for what follows from the others.
    """
    epoch = Fraction(rows, batch_size)

    # With days in order, rounding up would repeat the first day, so the last batch is left out.
    rounded = math.floor if order == "days" else math.ceil
    num_steps = num_steps or max(1, rounded(_as_written(num_epochs) * epoch))
    if num_steps > _MAX_STEPS:
        raise InputError(
            f"num_steps, num_epochs: must give at most {_MAX_STEPS:,} steps: found more, with"
            f" num_epochs={num_epochs}, batch_size={batch_size} and {rows:,} examples."
        )
    eval_every = eval_every_steps or math.ceil(epoch / steps_per_execution) * steps_per_execution
    save_every = save_every_steps or eval_every
    valid = "" if valid == NEXT_DAY else valid
    return RunSchedule(num_steps, eval_every, save_every, log_every_steps, valid, {})


def _as_written(number: float) -> Fraction:
    """Returns the decimal fraction as written. The binary value of 0.07 may add a step."""
    return Fraction(repr(float(number)))  # `float` also converts NumPy numbers
