"""Output of `bench`: text and JSON."""

from typing import Any

from jaxrank.bench.measure import Bench


def describe(found: Bench) -> str:
    """Formats the measurements as aligned text."""
    lines = [
        f"{found.device}, batch {found.batch_size:,}",
        f"{'':<14}{'examples/s':>14}{'of step':>10}",
    ]
    for name, rate in found.rates._asdict().items():
        lines.append(f"  {name:<12}{rate:>14,.0f}{rate / found.rates.step:>10.1%}")
    lines += ["", f"{'':<14}{'s per million':>14}{'share':>10}"]
    total = sum(found.stages.values())
    for name, seconds in found.stages.items():
        mark = "  <- limits" if name == found.limit else ""
        lines.append(f"  {name:<12}{seconds:>14.3f}{seconds / total:>10.1%}{mark}")
    return "\n".join([*lines, "", found.advice])


def to_json(found: Bench) -> dict[str, Any]:
    """Converts the measurements to plain data."""
    rates = {name: {"examples_per_second": rate} for name, rate in found.rates._asdict().items()}
    return rates | {
        "both_over_step": found.rates.both / found.rates.step,
        "stages": found.stages,
        "limit": found.limit,
        "advice": found.advice,
        "device": found.device,
        "batch_size": found.batch_size,
    }
