"""Increasing maps of log-odds, for arrays of NumPy and of JAX.

A map is increasing, so calibration changes neither the order of examples nor the AUC of a task.
Corrections per value of a feature (`by_value`) can change the order of examples of two values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank.calibration.by_value import ByValue

_MIN_GAP = 1e-6  # of a child below its parent, where its conditional probability is near 1


class LogitMap(NamedTuple):
    """Interpolates between knots, and goes on along straight lines beyond the first and last one.

    x, y: log-odds before and after calibration at each knot, both increasing. At least one.
    left, right: slopes beyond the first and the last knot.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    left: float
    right: float

    def __call__(self, logits: Any, xp: Any = np) -> Any:
        """Maps log-odds f[n].

        Args:
            xp: the module of the arrays, `numpy` or `jax.numpy`.
        """
        if xp is np:  # a split has too many examples for an array of examples x knots
            inside = np.interp(logits, self.x, self.y)
            below, above = np.minimum(logits - self.x[0], 0), np.maximum(logits - self.x[-1], 0)
            return (inside + self.left * below + self.right * above).astype(logits.dtype)
        x, y = (xp.asarray(values, logits.dtype) for values in (self.x, self.y))
        result = y[0] + self.left * xp.minimum(logits - x[0], 0)
        result = result + self.right * xp.maximum(logits - x[-1], 0)
        if len(self.x) == 1:
            return result
        parts = (logits[:, None] - x[None, :-1]) / (x[1:] - x[:-1])[None, :]
        return result + (xp.clip(parts, 0, 1) * (y[1:] - y[:-1])[None, :]).sum(axis=1)

    def to_state(self) -> dict[str, Any]:
        """Converts the map to JSON."""
        return self._asdict()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "LogitMap":
        return cls(tuple(state["x"]), tuple(state["y"]), state["left"], state["right"])


class Calibration(NamedTuple):
    """The maps of a checkpoint's tasks.

    maps: by the number of the task. A task without one keeps its outputs.
    parents: see `outputs.joint_logits`. Empty: no task has a parent.
    origin: method and data of the fit, for reports.
    by: corrections per value of a feature. None: there are none.
    """

    maps: Mapping[int, LogitMap]
    parents: tuple[int, ...]
    origin: Mapping[str, Any]
    by: ByValue | None = None

    def __call__(
        self, logits: Any, xp: Any = np, coefficients: tuple[Any, Any] | None = None
    ) -> Any:
        """Maps the outputs of all tasks f[n, tasks]. No joint probability exceeds its parent's.

        Args:
            xp: as in `LogitMap`.
            coefficients: of the examples, see `ByValue.coefficients`. Needed if there is `by`.
        """
        columns = [logits[:, task] for task in range(logits.shape[1])]
        for task, mapped in self.maps.items():
            columns[task] = mapped(columns[task], xp)
            if coefficients is not None:
                slopes, offsets = coefficients
                columns[task] = slopes[:, task] * columns[task] + offsets[:, task]
        return xp.stack(bounded(columns, self.parents, xp), axis=1)

    def to_state(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Converts the calibration to JSON, with the names of all tasks instead of numbers."""
        return {
            "tasks": list(tasks),
            "maps": {tasks[i]: entry.to_state() for i, entry in self.maps.items()},
            "parents": list(self.parents),
            "origin": dict(self.origin),
            "by": self.by.to_state() if self.by else None,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Calibration":
        numbers = {name: i for i, name in enumerate(state["tasks"])}
        maps = {numbers[name]: LogitMap.from_state(m) for name, m in state["maps"].items()}
        by = state.get("by")  # absent in states of earlier versions
        corrections = None if by is None else ByValue.from_state(by)
        return cls(maps, tuple(state["parents"]), state["origin"], corrections)


def bounded(columns: Sequence[Any], parents: Sequence[int], xp: Any = np) -> list[Any]:
    """Returns the log-odds of joint probabilities, none above that of the parent.

    Args:
        columns: f[n] of each task.
        parents: see `Calibration`.
    """

    def bound(task: int) -> Any:
        if not parents or parents[task] < 0:
            return columns[task]
        return xp.minimum(columns[task], bound(parents[task]))

    return [bound(task) for task in range(len(columns))]


def conditional(joint: Any, parent: Any, xp: Any = np) -> Any:
    """Returns the log-odds of p / q for p = sigmoid(joint) and q = sigmoid(parent), p at most q.

    p / (q - p) = (1 + e^parent) / (e^(parent - joint) - 1), which has no large numbers if computed
    in logarithms.
    """
    gap = xp.maximum(parent - joint, _MIN_GAP)
    return xp.logaddexp(parent, 0) - gap - xp.log(-xp.expm1(-gap))
