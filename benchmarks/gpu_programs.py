"""The steps of benchmarks/gpu_cases.py by the GPU compiler, for a GPU that is not here.

    pip install -e '.[gpu-compiler]' && python benchmarks/gpu_programs.py

Prints, for each, the memory that the program takes and the largest arrays that it makes besides
those that it changes where they are. --deterministic compiles with XLA's flag for sums that are
the same in every run.
"""

import argparse
import os
import time

from gpu_cases import CASES
from gpu_step import STEPS, program_of
from refused import run_main

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    if args.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"

    from jaxrank import mesh as meshes
    from jaxrank.aot import checks, devices
    from jaxrank.aot.topology import topology

    mesh = meshes.mesh_of(devices.devices(topology(f"{args.gpu}-1")), 1)
    for name in args.cases:
        program = program_of(CASES[name](), mesh)
        calls = program.shape.struct(program.trainee.embedding.layout, leading=(STEPS,))
        began = time.monotonic()
        step = program.train.lower(program.state_shape, calls).compile()
        seconds = time.monotonic() - began
        memory, text = step.memory_analysis(), step.as_text()
        made = max(one.made_bytes for one in checks.large_results(text, 1))
        print(
            f"{name}: {memory.argument_size_in_bytes / GIB:.2f} GiB of state and batches,"
            f" {memory.temp_size_in_bytes / GIB:.2f} of temporaries, of which the largest that one"
            f" instruction makes {made / GIB:.2f}; compiled in {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
