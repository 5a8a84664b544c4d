"""The steps of benchmarks/gpu_cases.py by the GPU compiler, for a GPU that is not here.

    pip install -e '.[gpu-compiler]' && python benchmarks/gpu_programs.py

Prints, for each, the memory that the program takes and the largest arrays that it makes besides
those that it changes where they are. --deterministic compiles with XLA's flag for sums that are
the same in every run.
"""

import argparse
import os
import time
from typing import Any

from gpu_cases import CASES, Case
from gpu_step import GROUP, STEPS, schema_of

GIB = 2**30


def program_of(case: Case, mesh: Any) -> tuple[Any, Any]:
    """jaxrank's programs of a case, and the shapes of a call's batches."""
    from jaxrank.features import layout
    from jaxrank.program import BatchShape, Program, make_trainee

    found = layout(schema_of(case), {f"t{i}": dim for i, (_, dim) in enumerate(case.tables)})
    size = case.config.batch_size
    group = GROUP if size % GROUP == 0 else size
    lists = [f.ids for f in case.features if f.ids > 1]
    capacities = {s.name: group * sum(lists[i] for i in s.lists) for s in found.stacks if s.lists}
    shape = BatchShape(size, group, capacities)
    trainee = make_trainee(case.config, found, mesh, num_steps=1000, room={})
    return Program(trainee, mesh, shape), shape.struct(found, leading=(STEPS,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    if args.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"

    from jaxrank import absent, compiled
    from jaxrank import mesh as meshes
    from jaxrank.topology import topology

    mesh = meshes.mesh_of(absent.devices(topology(f"{args.gpu}-1")), 1)
    for name in args.cases:
        program, calls = program_of(CASES[name](), mesh)
        began = time.monotonic()
        step = program.train.lower(program.state_shape, calls).compile()
        seconds = time.monotonic() - began
        memory, text = step.memory_analysis(), step.as_text()
        made = max(r.bytes for r in compiled.large_results(text, 1))
        print(
            f"{name}: {memory.argument_size_in_bytes / GIB:.2f} GiB of state and batches,"
            f" {memory.temp_size_in_bytes / GIB:.2f} of temporaries, of which the largest that one"
            f" instruction makes {made / GIB:.2f}; compiled in {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
