import re

import examples
import jax
import numpy as np
import pytest
import tiny

from jaxrank import mesh as meshes
from jaxrank.program import BatchShape, Program, make_trainee

ROWS = 200_000


def compiled_step(devices, rule, scope="read", dims=None):
    """The text of the compiled training program, and how many rows a device holds at least."""
    c = tiny.config(batch_size=64)
    c.optim.tables.name = rule
    c.embedding.l2_scope = scope
    lay = examples.small_layout(dims or {"ta": 8, "tb": 8, "tc": 5}, rows=ROWS)
    mesh = meshes.make_mesh(devices=devices)
    trainee = make_trainee(c, lay, mesh, num_steps=8)
    shape = BatchShape(64, 8, {s.name: 40 for s in lay.stacks})
    program = Program(trainee, mesh, shape)
    batch = shape.struct(lay, leading=(3,))
    return program.train.lower(program.state_shape, batch).compile()


def large_results(text, size):
    """Instructions whose result has at least `size` elements, without those that make nothing."""
    free = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "call"}
    found = []
    for line in text.splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match and match[2] not in free:
            elements = np.prod([int(d) for d in match[1].split(",")])
            if elements >= size:
                found.append((match[2], line.strip()))
    return found


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "lazy_adam", "ftrl"])
def test_the_compiled_step_makes_no_array_of_table_size_but_the_scatters(rule, devices):
    compiled = compiled_step(devices, rule)
    found = large_results(compiled.as_text(), ROWS // devices)
    names = {name for name, _ in found}
    assert "scatter" in names
    stray = [
        line for name, line in found if name != "scatter" and "calls=%wrapped_scatter" not in line
    ]
    assert not stray


def test_the_search_for_large_results_finds_what_a_dense_update_makes():
    found = large_results(compiled_step(1, "rowwise_adagrad", scope="table").as_text(), ROWS)
    assert any(name != "scatter" and "scatter" not in line for name, line in found)


def test_all_state_is_updated_in_place():
    compiled = compiled_step(1, "lazy_adam")
    memory = compiled.memory_analysis()
    state = memory.alias_size_in_bytes
    assert state >= 3 * ROWS * 8 * 4  # the tables and both moments
    assert memory.output_size_in_bytes - state < 200_000
    assert memory.temp_size_in_bytes < ROWS * 8 * 4 / 4


def test_one_program_serves_the_whole_run():
    c = tiny.config(batch_size=64)
    lay = examples.small_layout()
    mesh = meshes.make_mesh(devices=2)
    trainee = make_trainee(c, lay, mesh, num_steps=8)
    program = Program(trainee, mesh, BatchShape(64, 8, {"dim8": 40}))
    state = program.init()
    for seed in range(3):
        batches = [
            examples.random_batch(lay, 64, seed=seed + i, group=8, capacity=40) for i in (0, 9)
        ]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
        state, _ = program.train(state, meshes.put_batch(stacked, mesh, leading=1))
    assert program.train._cache_size() == 1
