"""Checksums by the devices and by the host, which stands in for them in most tests."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank.checkpoints import checksums as of_arrays
from jaxrank.checkpoints.checksums import checksums, host_checksum


def test_checksums_of_the_host_are_those_of_the_devices(monkeypatch):
    monkeypatch.setattr(of_arrays, "_CHUNK", 2**10)
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(24, 128)).astype(np.float32),
        rng.normal(size=(3001, 7)).astype(np.float32),  # chunks that overlap
        rng.integers(-9, 9, 5).astype(np.int32),
        np.int32(7),
        np.array([True, False, True]),
        rng.normal(size=(3, 2, 5)).astype(np.float16),
        np.zeros((0, 4), np.float32),
    ]
    (*expected,) = checksums(arrays).values()
    assert [host_checksum(np.asarray(a)) for a in arrays] == expected
    parts = [host_checksum(arrays[1][a:b], a) for a, b in ((0, 7), (7, 2000), (2000, 3001))]
    assert sum(parts) % 2**32 == expected[1]
    mesh = meshes.make_mesh(devices=4, replicas=2)
    for spec in (P(), P(meshes.SHARD)):
        on_mesh = jax.device_put(arrays[0], NamedSharding(mesh, spec))
        assert checksums([on_mesh]) == checksums(arrays[:1])
