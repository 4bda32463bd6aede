"""Ray for one run, and where its processes go: one placement-group bundle a device.

On GPUs every process sees exactly the devices of its slot, whatever mask the driver was started with.
On a CPU a "device" is a process slot: trainer and engines share the cores in turns.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_mlm.config.schema import ClusterConfig
from grpo_mlm.errors import RunFailure, UserError

OBJECT_STORE_BYTES = 1 << 30  # of a CPU run: batches are small, weights never pass through it
CONNECT_S = 10.0  # longest wait for a sign of life from `cluster.address`


@dataclass(frozen=True)
class Slot:
    """Where one process runs: a bundle, and the environment that shows it its devices."""

    group: PlacementGroup
    bundle: int
    env: dict[str, str] = field(default_factory=dict)
    node: str = ""  # "" where all slots are on one


@contextmanager
def ray_cluster(config: ClusterConfig, device: str, devices: int) -> Iterator[None]:
    """Ray for the length of a run: a private one, or the cluster at `cluster.address`."""
    # A private cluster must be private: an address left over in the environment is not ours.
    if config.address is None:
        os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_terminate = signal.getsignal(signal.SIGTERM)
    if config.address is None:
        cpus = max(devices, os.cpu_count() or 1) + 1
        store = OBJECT_STORE_BYTES if device == "cpu" else None
        ray.init(
            "local",
            num_cpus=cpus,
            object_store_memory=store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    else:
        try:
            _knock(config.address)
            ray.init(config.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"cluster.address: no Ray cluster at {config.address!r}: {error}") from error
    # Ray's own handler would end the driver without unwinding.
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """OSError where nothing listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


@contextmanager
def reserve(devices: int, device: str, timeout_s: float) -> Iterator[list[Slot]]:
    """One slot a device, neighbours on one node; too few devices are an error with both numbers."""
    resource = "GPU" if device == "cuda" else "CPU"
    have = int(ray.cluster_resources().get(resource, 0))
    if have < devices:
        raise UserError(
            f"the run asks for {devices} devices and the Ray cluster has {have} ({resource}); "
            "lower the parallel sizes or add nodes"
        )
    group = placement_group([{"CPU": 1, resource: 1}] * devices, strategy="PACK")
    try:
        if not group.wait(timeout_s):
            free = int(ray.available_resources().get(resource, 0))
            raise RunFailure(
                f"{devices} devices asked, {free} free now of {have}: not placed within {timeout_s:.0f} s"
            )
        yield _slots(group, devices, device)
    finally:
        remove_placement_group(group)


def _slots(group: PlacementGroup, devices: int, device: str) -> list[Slot]:
    if device == "cpu":
        return [Slot(group, i) for i in range(devices)]
    probe = ray.remote(num_gpus=1, num_cpus=0)(_gpu_of_bundle)
    where = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(devices)]
    found = ray.get([probe.options(scheduling_strategy=strategy).remote() for strategy in where])
    order = sorted(range(devices), key=lambda i: found[i])
    # The processes ask Ray for no GPU of their own (trainer and engine share a slot), so Ray must not
    # hide them all: the mask is set here.
    return [
        Slot(
            group,
            i,
            {"CUDA_VISIBLE_DEVICES": found[i][1], "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
            found[i][0],
        )
        for i in order
    ]


def _gpu_of_bundle() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def join_slots(slots: list[Slot]) -> Slot:
    """One slot for a process that drives several devices of a node (an engine with tensor parallelism)."""
    masks = [slot.env["CUDA_VISIBLE_DEVICES"] for slot in slots if slot.env]
    env = slots[0].env | ({"CUDA_VISIBLE_DEVICES": ",".join(masks)} if masks else {})
    return Slot(slots[0].group, slots[0].bundle, env)
