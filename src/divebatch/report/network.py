"""What adding up gradients over many devices takes: a model with assumed constants, of which nothing was measured.

An all-reduce of B bytes over n devices takes 2 (n-1) a + 2 (n-1)/n B/w in a ring and 2 log2(n) a + 2 B/w in a tree,
whichever is less; a is the seconds of a hop and w the bytes a second of a link. Machines of eight devices add up
inside, then across, then hand out.
"""

import math
from dataclasses import dataclass

DEVICES_OF_A_MACHINE = 8
EFFICIENCY = 0.8
"""Assumed: of a link's nominal bandwidth."""
BACKWARD_SHARE = 2 / 3
"""Assumed: of a step's compute, behind which an all-reduce is hidden."""
BYTES_OF_A_GRADIENT = 4
"""Assumed: of each parameter, in float32."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of a hop and bytes a second in one direction."""

    hop: float
    bandwidth: float

    def all_reduce(self, devices: int, num_bytes: float) -> float:
        """Seconds by the quicker of a ring and a tree."""
        if devices == 1:
            return 0.0
        ring = 2 * (devices - 1) * self.hop + 2 * (devices - 1) / devices * num_bytes / self.bandwidth
        tree = 2 * math.log2(devices) * self.hop + 2 * num_bytes / self.bandwidth
        return min(ring, tree)

    def spread(self, devices: int, num_bytes: float) -> float:
        """Seconds of a reduce-scatter, or of an all-gather."""
        return (devices - 1) * self.hop + (devices - 1) / devices * num_bytes / self.bandwidth


# Bandwidths of NVIDIA's data sheets: NVLink 4 with 900 GB/s in both directions together, NDR InfiniBand with 400 Gb/s
# a port and one port a GPU. Hops are assumptions of the usual size, measured by nobody here.
NVLINK = Link(3e-6, EFFICIENCY * 450e9)
INFINIBAND = Link(8e-6, EFFICIENCY * 50e9)


def all_reduce(devices: int, num_bytes: float) -> float:
    """Seconds of an all-reduce: within one machine, or inside, across, inside.

    Args:
        devices: How many take part.
        num_bytes: What each of them has to add.
    """
    if devices <= DEVICES_OF_A_MACHINE:
        return NVLINK.all_reduce(devices, num_bytes)
    machines = math.ceil(devices / DEVICES_OF_A_MACHINE)
    across = INFINIBAND.all_reduce(machines, num_bytes / DEVICES_OF_A_MACHINE)
    return 2 * NVLINK.spread(DEVICES_OF_A_MACHINE, num_bytes) + across


def overlapped(compute: float, network: float) -> float:
    """Seconds of a step whose all-reduce runs behind the backward pass: the network adds what goes beyond that.

    Args:
        compute: Seconds of forward and backward pass and update on one device.
        network: Seconds of the all-reduce.
    """
    return compute + max(0.0, network - BACKWARD_SHARE * compute)
