"""Tests the estimate of a step's time: the costs of compiled programs, and the network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank.aot import devices, scaling
from jaxrank.aot.costs import costs
from jaxrank.aot.topology import find_topology, sides, topology
from jaxrank.step import MODEL_SCOPE

pytest.importorskip("libtpu", reason="the TPU compiler is for Linux on x86-64")

LANES = 128
WHOLE = P()


def compiled_text(function, *shapes, slice_name="v3-8", spec=WHOLE, donated=(), **options):
    """Compiles a function of whole arrays, or of a device's share if `spec` splits them."""
    mesh = meshes.device_mesh(devices.devices(topology(slice_name)), 1)
    there = NamedSharding(mesh, spec)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in shapes]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    lowered = jax.jit(mapped, donate_argnums=donated).lower(*placed)
    return lowered.compile(compiler_options=options).as_text()


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def total(cost_list, field):
    return sum(getattr(cost, field) for cost in cost_list)


@pytest.mark.parametrize(("precision", "passes"), [("default", 1), ("highest", 6)])
def test_products_count_as_often_as_their_loop_runs(precision, passes):
    def five(a, b):
        return jax.lax.fori_loop(0, 5, lambda _, a: jnp.dot(a, b, precision=precision), a)

    result = costs(compiled_text(five, array(jnp.float32, 512, 256), array(jnp.float32, 256, 256)))
    assert total(result, "flops") == 5 * 2 * 512 * 256 * 256 * passes


def test_batches_of_products_count_each_product_once():
    def three(a, b):
        return jnp.einsum("bij,bjk->bik", a, b)

    text = compiled_text(three, array(jnp.float32, 3, 512, 256), array(jnp.float32, 3, 256, 384))
    assert total(costs(text), "flops") == 3 * 2 * 512 * 256 * 384


def test_products_of_shared_inputs_and_their_gradients_count_what_meets():
    def experts(x, w):
        return jnp.einsum("bi,eij->bej", x, w)

    def gradients(x, w, g):
        return jax.vjp(experts, x, w)[1](g)

    shapes = array(jnp.float32, 512, 256), array(jnp.float32, 4, 256, 128)
    product = 2 * 512 * 4 * 256 * 128
    assert total(costs(compiled_text(experts, *shapes)), "flops") == product
    text = compiled_text(gradients, *shapes, array(jnp.float32, 512, 4, 128))
    assert total(costs(text), "flops") == 2 * product


MOVES = """
%slices (p: f32[480,1024]) -> f32[120,1024] {
  %p = f32[480,1024]{1,0:T(8,128)} parameter(0)
  ROOT %part = f32[120,1024]{1,0:T(8,128)} slice(%p), slice={[0:120], [0:1024]}
}

%puts (old: f32[480,1024], new: f32[8,1024], at: s32[]) -> f32[480,1024] {
  %old = f32[480,1024]{1,0:T(8,128)} parameter(0)
  %new = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %at = s32[]{:T(128)} parameter(2)
  ROOT %put = f32[480,1024]{1,0:T(8,128)} dynamic-update-slice(%old, %new, %at, %at)
}

ENTRY %main (a: f32[480,1024], b: f32[8,1024], i: s32[]) -> f32[480,1024] {
  %a = f32[480,1024]{1,0:T(8,128)} parameter(0)
  %b = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %room = f32[480,1024]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %ahead = ((f32[480,1024]{1,0}), f32[120,1024]{1,0:T(8,128)S(1)}, s32[]) slice-start(%a)
  %there = f32[120,1024]{1,0:T(8,128)S(1)} slice-done(%ahead)
  %moved = (f32[8,1024]{1,0:T(8,128)S(1)}, f32[8,1024]{1,0:T(8,128)}, u32[]) copy-start(%b)
  %fused = f32[120,1024]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%slices
  ROOT %changed = f32[480,1024]{1,0:T(8,128)} fusion(%a, %b, %i), kind=kLoop, calls=%puts
}
"""


def test_what_is_moved_counts_once_and_what_is_left_alone_does_not():
    rows = 4 * 1024
    result = {cost.opcode: cost.memory_bytes for cost in costs(MOVES) if cost.opcode != "fusion"}
    assert result == {"slice-start": 120 * rows, "copy-start": 8 * rows}
    sliced, changed = [c.memory_bytes for c in costs(MOVES) if c.opcode == "fusion"]
    assert sliced == 2 * 120 * rows
    assert changed == 2 * 8 * rows + 4  # the new rows read and written, and their index


ROWS, TABLE = 4096, 2**21  # does not fit fast memory


def test_rows_of_a_table_count_and_the_table_does_not():
    def read(table, row):
        return table.at[row].get(mode="fill", fill_value=0)

    result = costs(compiled_text(read, array(jnp.float32, TABLE, LANES), array(jnp.int32, ROWS)))
    # Rows are gathered, then PAD rows are zeroed. Each operation reads and writes them.
    assert total(result, "memory_bytes") == pytest.approx(4 * ROWS * LANES * 4, rel=0.05)


def test_a_table_changed_in_place_counts_its_changed_rows():
    def write(table, row, change):
        return table.at[row].add(change, mode="drop")

    shapes = (
        array(jnp.float32, TABLE, LANES),
        array(jnp.int32, ROWS),
        array(jnp.float32, ROWS, LANES),
    )
    result = costs(compiled_text(write, *shapes, donated=(0,)))
    # Changes are read, and rows are read and written.
    assert total(result, "memory_bytes") == pytest.approx(3 * ROWS * LANES * 4, rel=0.05)


def test_a_loop_that_ends_with_the_data_runs_for_each_slice_it_may_take():
    def some(table, chunks, count):
        def body(i, table):
            return table.at[chunks[i]].add(1.0, mode="drop")

        return jax.lax.fori_loop(0, count[0], body, table)

    shapes = array(jnp.float32, TABLE, LANES), array(jnp.int32, 7, ROWS), array(jnp.int32, 1)
    result = costs(compiled_text(some, *shapes, donated=(0,)))
    assert max(cost.runs for cost in result) == 7


def test_what_devices_send_counts_and_loops_that_wait_for_them_run_once():
    def rounds(buffers):
        def body(state):
            left, x = state
            x = jax.lax.all_to_all(x, meshes.SHARD, 0, 0, tiled=True) + 1
            return jax.lax.pmin(left - jnp.sum(x[0]), meshes.SHARD), x

        return jax.lax.while_loop(lambda state: state[0] > 0, body, (buffers[0, 0], buffers))[1]

    text = compiled_text(rounds, array(jnp.int32, 8 * 64, 256), spec=P(meshes.SHARD))
    (sent,) = [cost for cost in costs(text) if cost.opcode == "all-to-all"]
    assert (sent.runs, sent.sent_bytes) == (1, 64 * 256 * 4)


def test_a_sort_counts_the_passes_over_its_keys():
    text = compiled_text(lambda x: jnp.sort(x), array(jnp.int32, 2**14))
    assert total(costs(text), "compared") == 2**14 * 14 * 15 / 2


@pytest.mark.parametrize(
    ("name", "network", "is_torus"),
    [
        ("v3-8", (2, 2), False),
        ("v3-32", (4, 4), False),
        ("v2-512", (16, 16), True),
        ("v4-8", (2, 2, 1), False),
        ("v4-128", (4, 4, 4), True),
        ("v4-256", (4, 4, 8), True),
        ("v5e-256", (16, 16), True),
        ("v5e-64", (8, 8), False),
    ],
)
def test_networks_are_tori_where_their_ends_are_joined(name, network, is_torus):
    assert sides(topology(name)) == network
    assert scaling.joined(topology(name)) is is_torus


def seconds_sent(name, opcode, sent):
    """Returns the part, seconds and hops of one collective that sends this number of bytes."""
    device_slice = topology(name)
    cost = scaling.Cost("", opcode, 1, sent_bytes=sent)
    return scaling._collective(cost, device_slice, scaling.RATES[device_slice.generation])


def worst_cut_bytes(network, is_torus, each):
    """Counts bytes over a link of the worst cut across one axis, from pairs of chips."""
    chips, worst = np.prod(network), 0.0
    for side in network:
        if side > 1:
            links = chips / side * (2 if is_torus else 1)
            worst = max(worst, each * (chips / 2) ** 2 / links)
    return worst


@pytest.mark.parametrize("name", ["v3-8", "v3-128", "v4-8", "v4-128", "v5p-16", "v6e-8"])
def test_an_exchange_takes_what_the_busiest_cut_does(name):
    device_slice = topology(name)
    sent = 2**20
    part, took, _ = seconds_sent(name, "all-to-all", sent)
    chip = sent * device_slice.devices / device_slice.chips
    expected = worst_cut_bytes(
        sides(device_slice), scaling.joined(device_slice), chip / device_slice.chips
    )
    assert part == "exchange"
    assert took * scaling.RATES[device_slice.generation].link == pytest.approx(expected)


def test_a_twisted_torus_is_as_much_faster_as_was_published():
    plain = worst_cut_bytes((4, 4, 8), True, 2**20 / 128) / scaling.RATES["v4"].link
    assert seconds_sent("v4-256", "all-to-all", 2**20)[1] == pytest.approx(plain / 1.63)


def test_a_sum_goes_twice_around_the_rings_and_a_gathering_once():
    part, gathered, hops = seconds_sent("v4-128", "all-gather", 2**20)
    assert (part, hops) == ("exchange", 6)
    assert gathered == pytest.approx(2**20 / 6 / 50e9)  # six links per chip, each in one direction
    part, summed, hops = seconds_sent("v4-128", "all-reduce", 2**20)
    assert (part, summed, hops) == ("reduction", pytest.approx(2 * gathered), 12)


def test_a_step_is_bound_by_the_slowest_rate_of_each_instruction():
    def product(a, b):
        return jnp.dot(a, b)

    text = compiled_text(product, array(jnp.bfloat16, 8192, 8192), array(jnp.bfloat16, 8192, 8192))
    device_slice = topology("v3-8")
    result = scaling.step_time(text, device_slice, 64, 4)
    flops, of_core = 2 * 8192**3, 123e12 / 2
    assert result.product_flops == flops / 4
    assert result.total >= flops / of_core / 4
    assert result.total < 2 * flops / of_core / 4
    assert result.examples_per_second == 64 / result.total
    twice = result._replace(topology=topology("v3-16"), batch_size=128)
    assert scaling.speedup(result, twice) == pytest.approx(2)
    assert scaling.efficiency(result, twice) == pytest.approx(1)


@pytest.mark.parametrize("side", [256, 8192])
def test_an_exchange_takes_what_the_work_between_its_start_and_its_end_leaves(side):
    def step(x, a, b):
        return jax.lax.all_to_all(x, meshes.SHARD, 0, 0, tiled=True), jnp.dot(a, b), a

    shapes = (
        array(jnp.float32, 8, 2**16),
        array(jnp.bfloat16, side, side),
        array(jnp.bfloat16, side, side),
    )
    options = meshes.exchange_options(meshes.device_mesh(devices.devices(topology("v5e-8")), 1))
    texts = [compiled_text(step, *shapes, slice_name="v5e-8", **alone) for alone in ({}, options)]
    plain, started = (scaling.step_time(text, topology("v5e-8"), 8, 1) for text in texts)
    (product,) = (cost for cost in costs(texts[1]) if cost.flops)
    (exchange,) = (cost for cost in costs(texts[1]) if cost.sent_bytes)
    assert product.beside == exchange.name
    assert exchange.sent_bytes == total(costs(texts[0]), "sent_bytes") == 2**16 * 8 * 4
    whole = plain.seconds["exchange"] + plain.seconds["hops"]
    left = started.seconds["exchange"] + started.seconds["hops"]
    beside = total((c for c in costs(texts[1]) if c.beside), "flops") / scaling.RATES["v5e"].flops
    assert left == 0 if side == 8192 else whole * 0.5 < left <= whole - beside


def test_a_step_takes_as_long_in_a_call_of_one_as_in_one_of_many():
    def hlo_text(steps):
        def call(x):
            def step(_, x):
                return jax.lax.psum(jnp.dot(x, x) * 1e-3, meshes.SHARD)

            return jax.lax.fori_loop(0, steps, step, x)

        return compiled_text(call, array(jnp.float32, 1024, 1024))

    single, many = (scaling.step_time(hlo_text(n), topology("v3-8"), 64, n) for n in (1, 5))
    assert single.total == pytest.approx(many.total, rel=0.2)
    assert single.product_flops == many.product_flops == 2 * 1024**3
    with pytest.raises(ValueError, match="no exchange .* 7 steps"):
        scaling.step_time(hlo_text(5), topology("v3-8"), 64, 7)


def test_what_the_model_does_is_known_by_its_scope_forward_and_backward():
    def loss(kernel, x):
        with jax.named_scope(MODEL_SCOPE):
            y = jnp.dot(x, kernel)
        return jnp.dot(jnp.sin(y), y.T).sum()  # not in the model's scope

    text = compiled_text(jax.grad(loss, argnums=(0, 1)), *[array(jnp.float32, 1024, 1024)] * 2)
    products = [cost for cost in costs(text) if cost.flops]
    inside = total([c for c in products if scaling.is_of_model(c.scope)], "flops")
    assert len(products) == 5
    assert inside == pytest.approx(total(products, "flops") * 3 / 5, rel=0.05)
    assert not scaling.is_of_model("jit(train)/model_inputs/dot_general")


@pytest.mark.parametrize(
    ("name", "opcode", "milliseconds"),
    [
        ("h100-8", "all-to-all", 0.875),  # 7/8 of 450 MB at 450 GB/s
        ("h100-16", "all-to-all", 4.5),  # half of it at the 50 GB/s between machines
        ("h100-8", "all-reduce", 1.75),
        ("h100-16", "all-reduce", 2 * 450 * 15 / 16 / 8 / 50),
        ("h100-1", "all-reduce", 0.0),
    ],
)
def test_exchanges_of_gpus_take_the_time_of_the_slower_links(name, opcode, milliseconds):
    result = scaling.collective_seconds(opcode, 450e6, topology(name))
    assert result == pytest.approx(milliseconds / 1e3 + 1e-6)


def test_gpus_are_estimated_by_the_program_for_a_slice_of_as_many_devices():
    assert scaling.substitute(topology("a100-4")).name == "v6e-4"
    assert scaling.substitute(topology("v3-8")).name == "v3-8"

    def product(a, b):
        return jnp.dot(a, b, precision="default")

    shape = array(jnp.float32, 2048, 2048)
    text = compiled_text(product, shape, shape, slice_name="v6e-4")
    gpu = scaling.step_time(text, topology("a100-4"), 8, 1)
    assert gpu.seconds["tables and rest"] == pytest.approx(2 * 2048**3 / 312e12, rel=0.5)


@pytest.mark.parametrize("name", ["v2-8", "v3-32", "v4-16", "v5e-16", "v5p-16", "v6e-4"])
def test_devices_that_are_present_have_the_name_of_their_slice(name):
    there = devices.devices(topology(name))
    assert find_topology(there[0].device_kind, len(there)) == topology(name)
    assert find_topology("NVIDIA H100 80GB HBM3", 8).name == "h100-8"
    assert find_topology("cpu", 8) is None
