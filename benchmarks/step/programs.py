"""Parts of a step and the limits of a machine, for benchmarks of the step."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

STEPS = 4  # of products and copies between two waits


def tables(program: Any, batches: Sequence[Any], *, waits: bool = True) -> Iterator[None]:
    """Runs the lookup, the gradient of each row and its exact update, without layers.

    Yields after all steps of an execution.

    waits: wait for each execution, not only for the one before it.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    embedding = program.step_spec.embedding

    def step(state, batch):
        routes = embedding.route(batch)
        vectors, _ = embedding.lookup({k: t.rows for k, t in state[0].items()}, routes, batch)
        # The vectors serve as gradients. As in training, gradients depend on the vectors, so the
        # update cannot run before the lookup.
        grads = vectors
        if embedding.platform == "gpu":
            # Otherwise XLA would fuse the lookup into the sum of gradients. In training the
            # gradients are in memory. Other backends keep them in memory anyway, and on CPU the
            # barrier would copy them.
            grads = jax.lax.optimization_barrier(vectors)
        learning_rate, count = jnp.float32(0.05), jnp.zeros((), jnp.int32)
        return embedding.update(
            *state, routes, batch, grads, learning_rate=learning_rate, step=count
        ), count

    mapped = jax.shard_map(
        lambda *inputs: jax.lax.scan(step, *inputs),
        mesh=program.mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    options = program.step_spec.model.compiler_options(program.mesh.devices.flat[0].platform)
    options |= embedding.update_options
    train = jax.jit(mapped, donate_argnums=0, compiler_options=options)
    initial = program.init()
    state = initial.tables, initial.scratch
    del initial
    result = None
    while True:
        for batch in batches:
            before = result
            state, result = train(state, batch)
            jax.block_until_ready(result if waits else before)
            yield


def products(
    sizes: Sequence[tuple[int, int]], examples: int, dtype: str, precision: str = ""
) -> Iterator[None]:
    """Runs the products of forward and backward pass of layers (in, out), with float32 results.

    Uses XLA, or the products of jaxrank's models if `precision` is set. Waits once per STEPS steps.
    """
    import jax
    import jax.numpy as jnp

    from jaxrank.models.products import compiler_options, product

    def xla_program(x, kernel, grad):
        pairs = (x, kernel), (grad, kernel.T), (x.T, grad)
        return [jnp.dot(a, b, preferred_element_type=jnp.float32) for a, b in pairs]

    def jaxrank_program(x, kernel, grad):
        y, back = jax.vjp(lambda x, kernel: product(x, kernel, precision), x, kernel)
        return y, back(grad)

    options = compiler_options(precision or dtype, jax.devices()[0].platform)

    @functools.partial(jax.jit, compiler_options=options)
    def every(inputs):
        return [(jaxrank_program if precision else xla_program)(*layer) for layer in inputs]

    keys = iter(jax.random.split(jax.random.key(0), 3 * len(sizes)))
    operands = [
        tuple(
            jax.random.normal(next(keys), shape, dtype)
            for shape in ((examples, a), (a, b), (examples, b))
        )
        for a, b in sizes
    ]
    while True:
        for _ in range(STEPS):
            results = every(operands)
        jax.block_until_ready(results)
        yield


def copy(size: int, passes: int = STEPS) -> Iterator[int]:
    """Runs `passes` over an array of `size` bytes, waits, and yields the bytes read and written."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros(size // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    while True:
        for _ in range(passes):
            x = add(x)
        jax.block_until_ready(x)
        yield 2 * size * passes
