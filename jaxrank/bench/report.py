"""Output of `bench`: text and JSON."""

from typing import Any

from jaxrank.bench.measure import Bench


def describe(result: Bench) -> str:
    """Formats the measurements as aligned text."""
    lines = [
        f"{result.device}, batch {result.batch_size:,}",
        f"{'':<14}{'examples/s':>14}{'of step':>10}",
    ]
    for name, rate in result.rates._asdict().items():
        lines.append(f"  {name:<12}{rate:>14,.0f}{rate / result.rates.step:>10.1%}")
    lines += ["", f"{'':<14}{'s per million':>14}{'share':>10}"]
    total = sum(result.stages.values())
    for name, seconds in result.stages.items():
        mark = "  <- limits" if name == result.limit else ""
        lines.append(f"  {name:<12}{seconds:>14.3f}{seconds / total:>10.1%}{mark}")
    return "\n".join([*lines, "", result.advice])


def to_json(result: Bench) -> dict[str, Any]:
    """Converts the measurements to plain data."""
    rates = {name: {"examples_per_second": rate} for name, rate in result.rates._asdict().items()}
    return rates | {
        "both_over_step": result.rates.both / result.rates.step,
        "stages": result.stages,
        "limit": result.limit,
        "advice": result.advice,
        "device": result.device,
        "batch_size": result.batch_size,
    }
