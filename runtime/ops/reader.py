"""What reads the parts of a model by their names in the file; the loader is one."""

from typing import Protocol

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.operations import Stateful
from hotsplit.model.spec import Norm as NormSpec
from hotsplit.runtime.cache.state_slots import LayerState
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.store import Stores


class Reader(Protocol):
    @property
    def model(self) -> ModelFile: ...
    @property
    def stores(self) -> Stores: ...
    def state(self, block: Stateful, device: torch.device) -> LayerState: ...
    def own_vector(self, name: str, device: torch.device) -> Tensor: ...
    def matrix(self, entry: TensorEntry, device: torch.device) -> Matrix: ...
    def linear(self, name: str, device: torch.device) -> Linear: ...
    def norm(self, norm: NormSpec, name: str, device: torch.device) -> Norm: ...
