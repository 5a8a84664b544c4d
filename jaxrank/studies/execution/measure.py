"""Kinds of runs that measure or estimate rates, instead of training to a result.

Each function gets a `kinds.RunInput`, and returns the fields of `RunResult` that it knows.
"""

import os
from collections.abc import Mapping
from typing import Any


def describe_devices(run: Any) -> Mapping[str, Any]:
    """Returns the devices and the cores of this machine."""
    import jax

    from jaxrank.runtime import threads

    device = jax.devices()[0]
    values = {
        "count": jax.device_count(),
        "kind": device.device_kind,
        "platform": device.platform,
        "cores": threads.available_cores() or os.cpu_count(),
    }
    return {"values": values}


def bench(run: Any) -> Mapping[str, Any]:
    """Measures input, step and both. Settings: `seconds` of each."""
    from jaxrank.bench import measure, report

    result = measure.bench(run.config, run.directory / "bench", report=print, **run.settings)
    return {"examples_per_second": result.rates.both, "values": report.to_json(result)}


def input_rate(run: Any) -> Mapping[str, Any]:
    """Measures the input alone. Settings: `seconds`."""
    from jaxrank.bench import measure
    from jaxrank.run import build_measured

    with build_measured(run.config, run.directory / "input", print) as built:
        return {"examples_per_second": measure.input_rate(built, **run.settings)}


def prepare_store(run: Any) -> Mapping[str, Any]:
    """Prepares a store of its own. Settings: `block_size` in examples."""
    from jaxrank.opening import prepare

    store = prepare(run.config, run.directory / "store", report=print, **run.settings)
    splits = store.splits.values()
    values = {
        "store": str(store.path),
        "bytes": sum(split.bytes for split in splits),
        "rows": sum(split.rows for split in splits),
    }
    return {"values": values}


def estimate(run: Any) -> Mapping[str, Any]:
    """Estimates a step on absent devices. Settings: `topology`, such as v3-32 or a100-4."""
    from jaxrank.aot.compile import compile_slices
    from jaxrank.errors import RunError

    (compiled,) = compile_slices(
        run.config,
        [run.settings["topology"]],
        workdir="",
        scaling="strong",
        report=print,
    )
    took = compiled.step_time
    if took is None:
        name = compiled.topology.name
        raise RunError(f"{name}: the model must fit its devices: {compiled.compiler_error}")
    values = {
        "seconds": took.seconds,
        "limit": took.limit,
        "devices": compiled.topology.devices,
        "chips": compiled.topology.chips,
        "fits": compiled.fits,
        "product_flops": took.product_flops,
    }
    return {"examples_per_second": took.examples_per_second, "values": values}
