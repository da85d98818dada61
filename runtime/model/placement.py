"""The device of each part of a model."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from hotsplit.artifacts.split_file import Split


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device of each part. `hot`: for each layer, the units that are on its home; None:
    all.

    All parts of a layer that are on a GPU are on the same one, the layer's home."""

    homes: tuple[torch.device, ...]  # per layer, then the head's; the CPU if there is no GPU
    dense_on_gpu: tuple[bool, ...]
    head_on_gpu: bool
    hot: tuple[np.ndarray, ...] | None
    numbers: tuple[int, ...]  # for each home, the index of its GPU in the plan
    is_cache_on_host: bool = False  # keys and values are in main memory, and the CPU attends

    @classmethod
    def of_split(cls, split: Split, gpus: tuple[torch.device, ...]) -> "Placement":
        home = split.home or (0,) * (len(split.hot) + 1)
        return cls(
            homes=tuple(gpus[index] for index in home),
            dense_on_gpu=split.dense_on_gpu,
            head_on_gpu=split.head_on_gpu,
            hot=split.hot,
            numbers=tuple(home),
            is_cache_on_host=split.kv_offload is not None,
        )

    def of_block(self, layer: int, *, has_own_head: bool) -> "Placement":
        """The placement of a draft block, a model of one layer: its attention is where this
        layer's is, its neurons and a head of its own are on the CPU."""
        return replace(
            self,
            homes=(self.homes[layer], self.homes[-1]),
            dense_on_gpu=(self.dense_on_gpu[layer],),
            head_on_gpu=self.head_on_gpu and not has_own_head,
            hot=(np.zeros(0, np.int32),),
            numbers=(self.numbers[layer], self.numbers[-1]),
        )

    @classmethod
    def on_one_device(cls, num_layers: int, device: torch.device) -> "Placement":
        homes = (device,) * (num_layers + 1)
        return cls(
            homes=homes,
            dense_on_gpu=(True,) * num_layers,
            head_on_gpu=True,
            hot=None,
            numbers=(0,) * len(homes),
        )

    @classmethod
    def without_neurons(cls, num_layers: int, device: torch.device) -> "Placement":
        """Everything but the feed-forward neurons on the device."""
        none = np.zeros(0, np.int32)
        return replace(cls.on_one_device(num_layers, device), hot=(none,) * num_layers)

    def dense_device(self, layer: int) -> torch.device:
        return self.homes[layer] if self.dense_on_gpu[layer] else torch.device("cpu")

    def cache_device(self, layer: int) -> torch.device:
        """The device that holds a layer's keys and values, and attends."""
        return torch.device("cpu") if self.is_cache_on_host else self.dense_device(layer)

    def gpu(self, number: int) -> torch.device:
        """The device for the plan's GPU with this index."""
        return self.homes[self.numbers.index(number)]

    @property
    def words(self) -> str:
        """Names the devices and, unless one of them has everything, a digest of what is where.
        Placements with other words add up the same numbers in another order."""
        names = dict.fromkeys(
            "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
            for device in dict(zip(self.numbers, self.homes, strict=True)).values()
        )
        shown = " and ".join(names)
        if self.hot is None and not self.is_cache_on_host:
            return shown
        sides = (self.dense_on_gpu, self.head_on_gpu, self.numbers, self.is_cache_on_host)
        digest = hashlib.sha256(repr(sides).encode())
        for ids in self.hot or ():
            digest.update(f"{len(ids)};".encode() + ids.astype("<i8").tobytes())
        return f"{digest.hexdigest()[:16]} on {shown}"

    @property
    def head_device(self) -> torch.device:
        return self.homes[-1] if self.head_on_gpu else torch.device("cpu")
