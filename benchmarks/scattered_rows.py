"""What the memory gives of a tenth of the neurons, beside what the kernels reach.

    OMP_NUM_THREADS=1 python benchmarks/scattered_rows.py [--types q8_0,q4_0] [--threads 2,1]

The neurons are 22 random layers of TinyLlama's shape, gate, up and down of a neuron adjacent, in memory
allocated like weights. scattered_rows.c only reads their rows: the tenths that the kernels are given, by
as many threads, which wait for each other after each layer. A turn reads a line of each of a few rows at a
time: gates of these neurons, then ups, then downs, as the kernels do, or each neuron as one row; meanwhile
it may prefetch the rows of the next turn, to L1 or L2. All sides alternate, and each call reads another
tenth than the one before, so that nothing is in a cache. Figures are medians in GB/s, and shares of a
plain read of all rows."""

import argparse
import ctypes
import math
import statistics
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import gguf
import numpy as np
import torch
from c_library import compiled
from machine import result_of, write_result
from random_checkpoint import TINYLLAMA

from hotsplit.files.gguf_file import TensorEntry, type_of
from hotsplit.measure.timing.interleave import seconds_of, take_turns
from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.ops.neurons.native import NativeNeurons
from hotsplit.runtime.weights.matrix import Linear, Matrix
from hotsplit.runtime.weights.neuron_block import NeuronBlock
from hotsplit.runtime.weights.resident import Residence

SOURCE = Path(__file__).with_name("scattered_rows.c")
L, D, N = TINYLLAMA.num_layers, TINYLLAMA.hidden_size, TINYLLAMA.num_neurons
TENTHS = 10
PAGE = 4096
MADE_ROWS = 256  # random rows, which a matrix repeats
ROUNDS = 20
# Rows in a turn, and the cache to which those of the next one are prefetched (0: they are not).
READERS = ((1, 0), (1, 1), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 2))
BY_NEURON = ((1, 1), (4, 0), (4, 2), (8, 2))


class WorkStruct(ctypes.Structure):
    """`Work` of scattered_rows.c."""

    _fields_ = [("row", ctypes.c_void_p), ("end", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("layers", "streams", "bytes", "ahead", "hint")
    ]


class Reader:
    """What threads read in a call: for each, the addresses of each layer's rows, [turns, streams]."""

    def __init__(
        self, rows: list[list[np.ndarray]], row_bytes: int, hint: int, read: ctypes.CDLL
    ) -> None:
        self.num_bytes = row_bytes * sum(each.size for layers in rows for each in layers)
        self._read, self._kept = read, []
        self._works = (WorkStruct * len(rows))()
        for work, layers in zip(self._works, rows, strict=True):
            ends = np.array(list(accumulate(len(each) for each in layers)), np.int64)
            whole = np.ascontiguousarray(np.concatenate(layers))
            self._kept += [ends, whole]
            work.row, work.end, work.layers = whole.ctypes.data, ends.ctypes.data, len(layers)
            work.streams, work.bytes, work.ahead, work.hint = whole.shape[1], row_bytes, 1, hint

    def rate(self) -> float:
        """GB/s of a call."""
        return self.num_bytes / float(self._read.read_rows(self._works, len(self._works))) / 1e9


class Neurons:
    """The layers' neurons of one type, and their tenths."""

    def __init__(self, kind: str) -> None:
        values = np.random.default_rng(0).normal(0.0, 0.02, (MADE_ROWS, D)).astype(np.float32)
        made = gguf.quants.quantize(values, type_of(kind))
        rows = TensorEntry(
            shape=(3 * N, D), kind=kind, read_rows=lambda a, b: made[np.arange(a, b) % MADE_ROWS]
        )
        self.memory = Residence()
        self.matrices = [self.memory.matrix(rows) for _ in range(L)]
        self.row_bytes = self.matrices[0].row_bytes
        self.calls = [self._call(matrix) for matrix in self.matrices]
        order = np.random.default_rng(0).permutation(N)
        self.tenths = [np.sort(order[i::TENTHS]) for i in range(TENTHS)]
        named = [torch.zeros(N, dtype=torch.bool) for _ in self.tenths]
        self.masks = [
            pack_bits(each.index_fill_(0, torch.from_numpy(ids), True))
            for each, ids in zip(named, self.tenths, strict=True)
        ]

    def _call(self, matrix: Matrix) -> NativeNeurons:
        gate, up, down = (replace(matrix, data=matrix.data[i::3]) for i in range(3))
        block = NeuronBlock(
            role="hot", gate=Linear(weight=gate), up=Linear(weight=up), down=down,
            id_N=torch.arange(N), row_N=None, is_whole=True,
        )  # fmt: skip
        always = Gate(activation="fatrelu", threshold=-math.inf)
        call = NativeNeurons.of(block, always, N, is_named=True)
        call.x_D.fill_(1.0)
        return call

    def kernel_rate(self, number: int) -> float:
        """GB/s of the kernels."""
        for call in self.calls:
            assert call.named_W is not None
            call.named_W.copy_(self.masks[number % TENTHS])
        seconds = seconds_of(lambda: [call.run() for call in self.calls])
        return 3 * L * self.row_bytes * len(self.tenths[number % TENTHS]) / seconds / 1e9

    def readers(
        self, streams: int, hint: int, is_by_neuron: bool, threads: int, read: ctypes.CDLL
    ) -> list[Reader]:
        """A reader for each tenth. Rows that fill no turn are left out."""
        size = self.row_bytes // 64 * 64
        parts = np.zeros(1, np.int64) if is_by_neuron else np.arange(3) * self.row_bytes
        readers = []
        for ids in self.tenths:
            rows = []
            for own in np.array_split(ids, threads):
                own = own[: len(own) // streams * streams].astype(np.int64)
                first = [
                    matrix.data.data_ptr() + own * 3 * self.row_bytes for matrix in self.matrices
                ]
                rows.append([
                    (each.reshape(-1, 1, streams) + parts[:, None]).reshape(-1, streams) for each in first
                ])  # fmt: skip
            readers.append(Reader(rows, (3 if is_by_neuron else 1) * size, hint, read))
        return readers

    def plain_reader(self, threads: int, read: ctypes.CDLL) -> Reader:
        """Reads all rows in order."""
        pages = np.arange(3 * N * self.row_bytes // PAGE, dtype=np.int64) * PAGE
        rows = [
            [(m.data.data_ptr() + own).reshape(-1, 1) for m in self.matrices]
            for own in np.array_split(pages, threads)
        ]
        return Reader(rows, PAGE, 0, read)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    read = compiled(SOURCE)
    read.read_rows.restype = ctypes.c_double
    result = result_of("scattered_rows", level=library.level(), rounds=arguments.rounds)
    for kind in arguments.types.split(","):
        neurons = Neurons(kind)
        result[kind] = {
            count: _measured(kind, neurons, int(count), read, arguments.rounds)
            for count in arguments.threads.split(",")
        }
    print(f"wrote {write_result(result, 'scattered-rows', arguments.output)}")


def _measured(
    kind: str, neurons: Neurons, threads: int, read: ctypes.CDLL, rounds: int
) -> dict[str, object]:
    library.set_threads(threads)
    plain = neurons.plain_reader(threads, read)
    turns = {"plain read": lambda number: plain.rate(), "kernels": neurons.kernel_rate}
    for is_by_neuron, forms in ((False, READERS), (True, BY_NEURON)):
        for streams, hint in forms:
            readers = neurons.readers(streams, hint, is_by_neuron, threads, read)
            name = f"{streams} {'neurons' if is_by_neuron else 'rows'}, "
            name += f"prefetched to L{hint}" if hint else "not prefetched"
            turns[name] = partial(_rate, readers)
    rates = take_turns(turns, rounds)
    whole = statistics.median(rates["plain read"])
    print(f"{kind}, rows of {neurons.row_bytes} bytes, {threads} threads")
    for name, samples in rates.items():
        median = statistics.median(samples)
        print(f"  {name:32} {median:5.1f} GB/s  {median / whole:4.0%}", flush=True)
    return {"row_bytes": neurons.row_bytes, "gb_per_s": rates}


def _rate(readers: list[Reader], number: int) -> float:
    return readers[number % TENTHS].rate()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="q8_0,q4_0")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
