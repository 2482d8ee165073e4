import numpy as np
import pytest

from dbsl.base.seeds import generator, sample_seeds, sample_uniforms, stream_seed


def test_stream_seed_differs_by_seed_purpose_and_each_key():
    streams = [
        stream_seed(seed, purpose, *keys)
        for seed in range(4)
        for purpose in ("augment", "shuffle")
        for keys in np.ndindex(3, 3)
    ]
    assert len(set(streams)) == len(streams)
    assert all(0 <= stream < 2**63 for stream in streams)
    assert stream_seed(0, "augment", 1) != stream_seed(0, "augment", 1, 0)


def test_streams_are_the_same_in_every_version():
    """A run that is resumed after an update must go on with the same random numbers."""
    assert stream_seed(7, "augment", 3) == 2726448434389251769
    assert generator(7, "shuffle", 1).integers(1000, size=3).tolist() == [567, 580, 272]
    uniforms = sample_uniforms(2726448434389251769, np.array([0, 49_999]), 2)
    expected = [[0.36130214, 0.60588315], [0.60971208, 0.86077805]]
    np.testing.assert_allclose(uniforms, expected, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
def test_sample_uniforms_row_depends_on_its_sample_alone(dtype):
    samples = np.array([12, 5, 50_000, 0], dtype=dtype)
    whole = sample_uniforms(99, samples, 3)
    for row, sample in enumerate(samples):
        np.testing.assert_array_equal(sample_uniforms(99, np.array([sample]), 3)[0], whole[row])
    np.testing.assert_array_equal(sample_uniforms(99, samples, 2), whole[:, :2])


def test_sample_uniforms_are_uniform_and_uncorrelated():
    uniforms = sample_uniforms(stream_seed(0, "augment", 0), np.arange(100_000), 3)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    np.testing.assert_allclose(uniforms.mean(0), 0.5, atol=0.005)
    np.testing.assert_allclose(uniforms.var(0), 1 / 12, atol=0.002)
    neighbours = np.column_stack([uniforms[:-1], uniforms[1:]])
    correlation = np.corrcoef(neighbours.T) - np.eye(6)
    assert np.abs(correlation).max() < 0.015


def test_sample_seeds_are_distinct():
    seeds = sample_seeds(stream_seed(3, "host augment", 1), np.arange(200_000))
    assert seeds.dtype == np.uint64
    assert len(np.unique(seeds)) == len(seeds)
