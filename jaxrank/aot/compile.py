"""Compiles the programs of a config for absent TPU slices and GPUs, and reports their memory and
cost."""

import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank.aot import checks
from jaxrank.aot import devices as absent
from jaxrank.aot.scaling import StepTime, grown, step_time, substitute
from jaxrank.aot.topology import Topology, topology
from jaxrank.build import Builder
from jaxrank.errors import InputError
from jaxrank.placement import plan
from jaxrank.placement.cost import Machine, PlacementPlanner
from jaxrank.program import BatchShape, CompiledSteps, check_batch
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.runtime.prefetch import AHEAD

# Smaller parts of a table may be moved whole through the fast memory of a core.
_FAST_MEMORY = 128 * 2**20
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """The compiled program of one device and its memory, in bytes unless stated otherwise.

    fits: training and evaluation fit, each with everything else that is in memory at that time.
    usable_bytes: memory available to a program.
    used_bytes: maximum memory in use.
    tables_bytes: rows and their accumulators.
    state_bytes: the whole training state, with tables.
    batches_bytes: batches of the current execution and of the prefetched ones.
    temporaries_bytes: of the training step.
    evaluation_bytes: temporaries of an evaluation step.
    collectives: {kind: bytes sent per step}, see `checks.collective_bytes`.
    flops: floating point operations per step. 0 if the compiler does not report them, as on GPUs.
    tables_aliased: tables are updated in place, and no other array has their size.
    compile_seconds: of the training step.
    compiler_error: the error of the compiler if it rejected the program, or empty.
    step_time: the estimated time of a step, if requested.
    """

    topology: Topology
    fits: bool
    usable_bytes: int
    used_bytes: int
    tables_bytes: int
    state_bytes: int
    batches_bytes: int
    temporaries_bytes: int
    evaluation_bytes: int
    collectives: dict[str, int]
    flops: float
    tables_aliased: bool
    compile_seconds: float
    compiler_error: str
    step_time: StepTime | None = None


def compile_slices(
    config: ConfigDict,
    names: list[str],
    *,
    workdir: str,
    scaling: str = "",
    report: Report,
) -> Iterator[Compiled]:
    """Compiles training and evaluation for each of several slices.

    Args:
        names: slices, such as "v3-32", and GPUs, such as "h200-8".
        workdir: of a run whose prepared data is read. May be empty, see `plan.load_inputs`.
        scaling: one of `validate.GROWTH` to estimate the time of a step, or empty. With weak
            scaling, `config.batch_size` applies to the slice with the fewest devices. GPUs are
            then compiled as their `scaling.substitute`.
        report: gets lines to print.

    Raises:
        InputError: a name or a field of the config is invalid, there is no data or no compiler, or
            `scaling` is used with several generations.
    """
    slices = [topology(name) for name in names]
    mesh = configs.mesh(config)
    if scaling:
        _check_scaling(slices, mesh.devices)
    configs.check(config)
    machines = [
        _absent_machine(machine, substitute(machine) if scaling else machine, mesh)
        for machine in slices
    ]
    builder, data = plan.load_inputs(config, workdir, report)
    smallest = min((machine.topology for machine in machines), key=lambda t: t.devices)
    if scaling and slices[0].is_gpu:
        report(
            "GPUs are estimated from the program of the TPU compiler for as many devices of v6e,"
            " with NVIDIA's rates. Memory, bytes sent and operations belong to that program, too:"
            " without --scaling the GPU compiler reports them"
        )
    cases: list[_Case] = []  # all of them are checked before the first is compiled
    for machine in machines:
        resized = builder
        if scaling == "weak":
            resized = builder.resized(grown(builder.batch_size, smallest, machine.topology))
            configs.check(resized.config)
        lists = resized.plan_list_room(data.split, data.traffic.list_lengths, report)
        workload = resized.workload(lists)
        planner = PlacementPlanner(workload, data)
        check_batch("batch_size", workload.batch_size, planner.shape.group, machine.mesh.size)
        num_steps = resized.run_schedule(data.rows).num_steps
        steps = workload.steps_per_execution
        cases.append(_Case(machine, planner, resized, num_steps, steps, mesh.replicas))
    for case in cases:
        compiled, text = _compiled_case(case, report)
        if scaling and not compiled.compiler_error:
            size = case.planner.shape.batch_size
            took = step_time(text, case.machine.topology, size, case.steps_per_execution)
            compiled = compiled._replace(step_time=took)
        yield compiled


class _AbsentMachine(NamedTuple):
    """A slice or GPUs that are absent. topology: with the number of devices that a run uses."""

    topology: Topology
    mesh: Mesh
    hosts: int


class _Case(NamedTuple):
    """A program to compile for a machine.

    builder: of the run, with the batch size of this machine.
    num_steps: of the run.
    replicas: the field `mesh.replicas`.
    """

    machine: _AbsentMachine
    planner: PlacementPlanner
    builder: Builder
    num_steps: int
    steps_per_execution: int
    replicas: int


def _check_scaling(slices: list[Topology], devices: int) -> None:
    """Raises InputError if the times of steps on these slices cannot be estimated together."""
    names = ", ".join(machine.name for machine in slices)
    if len({machine.generation for machine in slices}) > 1:
        raise InputError(f"--scaling: must compare slices of one generation: found {names}.")
    if devices:
        raise InputError(
            f"--scaling: must use whole slices: found mesh.devices={devices}. Set it to 0."
        )


def _absent_machine(machine: Topology, compiled: Topology, section: configs.Mesh) -> _AbsentMachine:
    """Returns the mesh of a machine.

    Args:
        compiled: the topology whose devices it consists of.
        section: the section `mesh` of the config.
    """
    whole = absent.devices(compiled)
    used = meshes.used(section.devices, machine.devices)
    mesh = meshes.device_mesh(whole[:used], section.replicas)
    hosts = len({device.process_index for device in whole})
    if used < machine.devices:
        processes.check_devices(mesh, hosts)
    return _AbsentMachine(machine._replace(devices=used), mesh, hosts)


def _compiled_case(case: _Case, report: Report) -> tuple[Compiled, str]:
    """Compiles a case; see `_compiled`."""
    (target, mesh, hosts), shape = case.machine, case.planner.shape
    shards = case.builder.data.shards
    if shards % hosts:
        report(
            f"{target.name} has {hosts} hosts: data.shards must be a multiple of the number of"
            f" processes to train on it: found {shards}"
        )
    report(f"Compiling for {target.name}, batch {shape.batch_size:,}")
    placed = case.planner.cost(
        Machine(target.name, target.devices, case.replicas, target.usable_bytes)
    )
    step_spec = case.builder.step_spec(
        placed.layout, mesh, num_steps=case.num_steps, room=placed.room
    )
    program = CompiledSteps(step_spec, mesh, shape)  # like `run.build` on that machine
    return _compiled(program, target, case.steps_per_execution, case.builder.eval.batch_size)


def _compiled(
    program: CompiledSteps, target: Topology, steps_per_execution: int, eval_batch_size: int
) -> tuple[Compiled, str]:
    """Compiles a program. Returns the report and the text of the training program."""
    layout = program.step_spec.embedding.layout
    executions = program.shape.struct(layout, leading=(steps_per_execution,))
    state = meshes.bytes_on_device(program.state_shape, program.state_sharding)
    tables = meshes.bytes_on_device(program.state_shape.tables, program.state_sharding.tables)
    execution = meshes.bytes_on_device(
        executions, jax.tree.map(lambda _: meshes.example_sharding(program.mesh, 1), executions)
    )
    started = time.monotonic()
    count = jax.ShapeDtypeStruct((), "int32")
    step, compiler_error, temporaries = _attempt(
        program.train, program.state_shape, executions, count
    )
    seconds = time.monotonic() - started
    text = step.as_text() if step else ""
    evaluation, waiting = _evaluation(program, eval_batch_size)
    batches = (2 + AHEAD) * execution
    used = state + max(batches + temporaries, batches - execution + waiting + evaluation)
    compiled = Compiled(
        topology=target,
        fits=not compiler_error and used <= target.usable_bytes,
        usable_bytes=target.usable_bytes,
        used_bytes=used,
        tables_bytes=tables,
        state_bytes=state,
        batches_bytes=batches,
        temporaries_bytes=temporaries,
        evaluation_bytes=evaluation,
        collectives=checks.collective_bytes(text),
        flops=_flops(step) if step else 0.0,
        tables_aliased=bool(step) and _is_in_place(program, step, tables),
        compile_seconds=seconds,
        compiler_error=compiler_error,
    )
    return compiled, text


def _evaluation(program: CompiledSteps, batch_size: int) -> tuple[int, int]:
    """Returns the bytes of temporaries of an evaluation step and of its batches, per device."""
    shape, predictor = program.shape, program.predictor
    unit = program.mesh.size * shape.group
    size = unit * math.ceil(batch_size / unit)
    batch = BatchShape(size, shape.group, shape.capacities).struct(predictor.layout)
    waiting = meshes.bytes_on_device(
        batch, jax.tree.map(lambda _: meshes.example_sharding(program.mesh), batch)
    )
    temporaries = _attempt(predictor.predict, predictor.weights_shape, batch)[2]
    return temporaries, (2 + AHEAD) * waiting


def _flops(step: Any) -> float:
    return (step.cost_analysis() or {"flops": 0.0})["flops"]


def _attempt(function: Any, *shapes: Any) -> tuple[Any, str, int]:
    """Compiles a function.

    Returns:
        The compiled program, or None if it is too large. The error of the compiler if it is too
        large, or empty. The bytes of its temporaries and its code.
    """
    try:
        program = function.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        size = re.search(r"(?:temporaries \(|[Uu]sed )([\d.]+)([KMGT])", text)
        if "RESOURCE_EXHAUSTED" not in text or size is None:
            raise
        return None, text[:500], round(float(size[1]) * _SIZES[size[2]])
    memory = program.memory_analysis()
    return program, "", memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def _is_in_place(program: CompiledSteps, step: Any, tables: int) -> bool:
    """Returns True if all tables are updated in place and no other array has a table's size.

    Tables that fit the fast memory of a core do not count.
    """
    state, sharding = program.state_shape.tables, program.state_sharding.tables
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), state, sharding)
    large = {size for size in jax.tree.leaves(sizes) if 4 * size > _FAST_MEMORY}
    results = checks.large_results(step.as_text(), min(large)) if large else []
    aliased = step.memory_analysis().alias_size_in_bytes
    return aliased >= tables and not any(result.largest in large for result in results)


def check_names(text: str) -> list[str]:
    """Splits "v3-8,v3-32" into names.

    Raises:
        InputError: there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(
            f"--topology: must name a TPU slice, such as v3-32, or GPUs, such as h200-8: found"
            f" {text!r}."
        )
    return names
