"""Lets equal runs share their programs, because most of a small run's time is their compilation."""

import json

import jax
import numpy as np

from jaxrank import run
from jaxrank.build import Builder
from jaxrank.checkpoints import checksums
from jaxrank.config_files import to_plain

# Fields that the programs of a step depend on, beside the arguments of `Builder.step_spec`.
_OF_STEP = (
    *("batch_size", "ema_decay", "seed", "task_losses", "task_weighting", "task_weights"),
    *("embedding", "model", "optim"),
)


def _key(config, layout, mesh, room, **more):
    fields = {name: config[name] for name in _OF_STEP}
    plain = {k: to_plain(v) if hasattr(v, "to_dict") else v for k, v in fields.items()}
    plain["on_nonfinite"] = config.watch.on_nonfinite
    text = json.dumps(plain | more, sort_keys=True, default=str)
    return text, layout, mesh, tuple(sorted(room.items()))


def share_programs(patch, programs):
    """Makes `Builder` and `run.build` return programs of `programs`, and adds new ones to it.

    Checksums are computed on the host, as `checksums_test` shows with equal results. The devices
    would compile a program for each shape of an array.

    Args:
        patch: `pytest.MonkeyPatch`.
        programs: {key: program or what it is made of}, empty at first.
    """
    make_step_spec, make_program, make_predictor = (
        Builder.step_spec, run.CompiledSteps, Builder.predictor
    )  # fmt: skip

    def step_spec(builder, layout, mesh, *, num_steps, room):
        config = builder.config
        rates = config.optim.dense, config.optim.tables
        # Constant rates do not depend on the number of steps.
        length = num_steps if any(part.decay != "constant" for part in rates) else 0
        key = "step", *_key(config, layout, mesh, room, length=length)
        if key not in programs:
            programs[key] = make_step_spec(builder, layout, mesh, num_steps=num_steps, room=room)
        return programs[key]

    def program(step_spec, mesh, shape):
        key = "program", id(step_spec), mesh, repr(shape)
        if key not in programs:
            programs[key] = step_spec, make_program(step_spec, mesh, shape)
        return programs[key][1]

    def predictor(builder, layout, mesh, *, room):
        key = "predictor", *_key(builder.config, layout, mesh, room)
        if key not in programs:
            programs[key] = make_predictor(builder, layout, mesh, room=room)
        return programs[key]

    on_devices = checksums._checksum

    def checksum(array):
        if isinstance(array, jax.Array) and not (
            array.is_fully_addressable or array.is_fully_replicated
        ):
            return on_devices(array)  # other processes have parts of it
        return np.uint32(checksums.host_checksum(np.asarray(array)))

    patch.setattr(checksums, "_checksum", checksum)
    patch.setattr(Builder, "step_spec", step_spec)
    patch.setattr(run, "CompiledSteps", program)
    patch.setattr(Builder, "predictor", predictor)
