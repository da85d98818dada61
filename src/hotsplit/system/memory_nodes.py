"""The memory nodes (NUMA) of this process's processors, and memory that is spread over them.

Linux gives a page to the node of the thread that first writes it. Weights are written by few
threads and read by all, so without more they would all lie in one node, whose bandwidth all
processors would then share. In turn over the nodes they have the bandwidth of all, whichever thread
reads which row."""

import ctypes
import logging
import os
import platform
from collections.abc import Iterable
from functools import cache

from hotsplit.system import control_groups

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_INTERLEAVE = 3  # MPOL_INTERLEAVE, include/uapi/linux/mempolicy.h


def nodes_of(allowed: Iterable[int]) -> tuple[int, ...]:
    """The nodes that these processors belong to; none if the system does not say."""
    folder = control_groups.ROOT / "sys/devices/system/node"
    wanted, found = set(allowed), []
    for path in folder.glob("node[0-9]*/cpulist"):
        if wanted & _numbers(path.read_text()):
            found.append(int(path.parent.name.removeprefix("node")))
    return tuple(sorted(found))


def spread(address: int, num_bytes: int, nodes: tuple[int, ...]) -> bool:
    """Lets pages of [address, address + num_bytes), which nobody has written yet, come from the
    nodes in turn. `address` is a multiple of the page size. False if the system refuses, as
    containers may: each page then comes from the node of the thread that writes it."""
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    values = (number, address, num_bytes, _INTERLEAVE)
    status = call(*map(ctypes.c_long, values), mask, ctypes.c_long(64 * len(mask) + 1), 0)
    return bool(status == 0)


def spread_if_many(address: int, num_bytes: int) -> None:
    """`spread` over the nodes of this process's processors, if there are several."""
    nodes = nodes_of(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    if len(nodes) > 1 and not spread(address, num_bytes, nodes):
        _note_refusal(nodes)


@cache
def _note_refusal(nodes: tuple[int, ...]) -> None:
    log.warning(
        f"note: the system does not let memory be spread over nodes {', '.join(map(str, nodes))};"
        " start with numactl --interleave=all, or the processors wait for one node's memory"
    )


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"; none of an empty one."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
