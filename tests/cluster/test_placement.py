"""Reaching a cluster that is not there."""

import time

import pytest

from grpo_mlm.cluster.placement import ray_cluster
from grpo_mlm.config.schema import ClusterConfig
from grpo_mlm.errors import UserError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_an_address_without_a_cluster_is_refused_in_seconds(address: str) -> None:
    started = time.monotonic()
    with (
        pytest.raises(UserError, match=r"cluster\.address"),
        ray_cluster(ClusterConfig(address=address), "cpu", 1),
    ):
        pass
    assert time.monotonic() - started < 60
