"""The results of a command, as a person reads them."""

from pathlib import Path

from jaxrank.evaluate import Metrics
from jaxrank.restore import Evaluation
from jaxrank.train import Result

_COLUMNS = ("logloss", "auc", "normalized_entropy", "calibration")
_TITLES = ("logloss", "AUC", "norm. entropy", "calibration")


def _line(name: str, found: dict[str, float]) -> str:
    return f"  {name:<16}" + "".join(f"{found[c]:>15.5f}" for c in _COLUMNS)


def _table(metrics: Metrics, constant: Metrics | None, best: Metrics | None) -> list[str]:
    lines = []
    for task, found in metrics.items():
        lines.append(f"{task:<18}" + "".join(f"{t:>15}" for t in _TITLES))
        lines.append(_line("model", found))
        if best and task in best:
            lines.append(_line("best possible", best[task]))
        if constant:
            lines.append(_line("best constant", constant[task]))
        if constant and best and task in best:
            gap = constant[task]["logloss"] - best[task]["logloss"]
            share = (constant[task]["logloss"] - found["logloss"]) / gap
            above = found["logloss"] - best[task]["logloss"]
            lines.append(
                f"  logloss is {above:.5f} above the best possible; the model has"
                f" {share:.1%} of what can be gained over a constant"
            )
        lines.append(f"  on {found['examples']:,} examples")
    return lines


def of_training(result: Result, workdir: str) -> str:
    """The end of `jaxrank train`."""
    lines = [
        "",
        f"Trained to step {result.step:,}: {result.examples_per_second:,.0f} examples/s,"
        f" {result.seconds:.0f} s in all. Validation at step {result.checkpoint_step:,}:",
        *_table(result.metrics, result.constant, result.best_possible),
        f"checkpoint   {result.checkpoint}",
        f"TensorBoard  tensorboard --logdir={Path(workdir) / 'tensorboard'}",
        f"every step   {Path(workdir) / 'metrics.jsonl'}",
    ]
    return "\n".join(lines)


def of_evaluation(result: Evaluation) -> str:
    """The end of `jaxrank evaluate`."""
    lines = [
        f"{result.checkpoint} on {result.data}: {result.seconds:.1f} s",
        *_table(result.metrics, result.constant, result.best_possible),
    ]
    for task, buckets in result.buckets.items():
        lines.append(f"calibration of {task}, by prediction")
        lines += [
            f"  {b['lower']:.4f} to {b['upper']:.4f}: predicted {b['predicted']:.5f}, observed"
            f" {b['observed']:.5f}, {b['examples']:,} examples"
            for b in buckets
        ]
    return "\n".join(lines)
