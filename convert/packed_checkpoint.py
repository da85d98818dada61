"""How the linear layers of a published checkpoint are packed: each becomes a logical matrix, of the
name and shape that it would have in 16 bits, so that nothing else knows of it.

A tensor's own companions say how it is packed, so modules left out and mixtures of packings need no
rules; config.json says what tensors cannot (docs/formats.md has the formulas).

Letters: N rows, M columns, G groups of columns that share a scale."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.convert.packed_matrix import E2M1, Codes, PackedMatrix, Rows, unpack_bits
from hotsplit.convert.weight_files import SourceTensor
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_object
from hotsplit.files.typed import shown

Config = Mapping[str, object]
KEYS = ("quantization_config", "compression_config", "quantization")
METHODS = {
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FBGEMM",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "humming": "humming",
    "mlx": "MLX",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}
REFUSED = {
    "bitsandbytes": ", whose levels (nf4, fp4) are no small integers",
    "exl2": ", whose columns are out of order, in groups of different bits",
    "exl3": ", whose codes are trellises of rotated columns",
}
FLOATS, EXPONENTS, WORDS = ("F32", "F16", "BF16"), ("U8", "F8_E8M0"), ("I32", "U32")
# Scales of activations and of keys and values, which stay in 16 bits here.
ACTIVATIONS = re.compile(
    r".*(\.(input_scale|input_scale_ub|input_global_scale|input_zero_point|[kvq]_scale|kv_scale"
    r"|output_scale|qscale_act|weight_shape)|[._]activation_scale)"
)
# The tensors that have the codes of a matrix, by the last word of one that belongs to them.
CODES = {
    "scales": ("qweight", "weight"),
    "biases": ("weight",),
    **dict.fromkeys(("qzeros", "g_idx"), ("qweight",)),
    **dict.fromkeys(("weight_scale", "weight_zero_point"), ("weight", "weight_packed")),
    **dict.fromkeys(("weight_scale_inv", "weight_scale_2", "qscale_weight"), ("weight",)),
    "weight_global_scale": ("weight_packed",),
}
UNHELD = re.compile(r".*\.(pre_quant_scale|lora_[ab]\.weight|bitmask)")
# Where a word's columns are in it, lowest bits first (AutoAWQ's order 0 2 4 6 1 3 5 7, inverted).
AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def logical(
    folder: Path, config: Config, stored: Mapping[str, SourceTensor], read: Callable[[str], Tensor]
) -> tuple[Config, Mapping[str, SourceTensor]]:
    """The config and the tensors of the checkpoint as if nothing in it were packed; both as they
    are if nothing is. `read` gives the stored tensors. Raises HotsplitError for a packing that is
    unknown, or whose tensors do not fit each other."""
    path, packing = _packing(folder, config)
    if packing is None:
        return config, stored
    method = str(packing.get("quant_method", "mlx" if "group_size" in packing else None))
    method = method.rpartition("/")[2].replace("compressed_", "compressed-")
    method = "modelopt" if method.startswith("modelopt") else method
    layout = packing.get("format") or packing.get("checkpoint_format")
    layout = packing.get("version") if method == "awq" else layout
    if method not in METHODS or re.search("24|marlin|gemv", str(layout)):
        what = f"quant_method is {shown(method)}{REFUSED.get(method, '')}"
        if method in METHODS:
            what = f"the format of its weights is {shown(layout)}"
        raise HotsplitError(
            f"{path}: {what}: its weights are packed in a way that cannot be read; known are"
            f" {', '.join(METHODS)}: take the original checkpoint, or a GGUF of it"
        )
    found = _Reader(path=path, packing=packing, method=method, stored=stored, read=read)
    for name in stored:
        found.take(name)
    if not found.tensors:
        stated = " and ".join(key for key in KEYS if key in config) or "the file"
        raise HotsplitError(
            f"{path}: says that weights are packed ({method}), but no tensor is; remove {stated} if"
            " they are not"
        )
    plain = {
        name: tensor
        for name, tensor in stored.items()
        if name not in found.used and ACTIVATIONS.fullmatch(name) is None
    }
    for name, tensor in plain.items():
        stem, _, last = name.rpartition(".")
        codes = [f"{stem}.{each}" for each in CODES.get(last, ())]
        if codes and not stored.keys() & {*codes}:
            raise HotsplitError(
                f"{tensor.file}: tensor {name!r} is a part of packed weights, but there is no"
                f" tensor {' or '.join(map(repr, codes))} with their codes; download the"
                " checkpoint again"
            )
    return _without_packing(config), plain | found.tensors


def _packing(folder: Path, config: Config) -> tuple[Path, Config | None]:
    """What says how weights are packed, if they are."""
    path = folder / "config.json"
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            if (packing := values.get(key)) is not None:
                return path, packing if isinstance(packing, dict) else {"quant_method": packing}
    # Beside it: older files of AutoGPTQ and ModelOpt.
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        if (folder / name).is_file():
            packing = read_object(folder / name, "description of packed weights")
            return folder / name, {"quant_method": method} | packing
    return path, None


def _without_packing(config: Config) -> Config:
    text = config.get("text_config")
    inner = {"text_config": _without_packing(text)} if isinstance(text, dict) else {}
    return {key: value for key, value in config.items() if key not in KEYS} | inner


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Finds the packed matrices among the stored tensors: `tensors`, by their logical names, made
    of the tensors `used`."""

    path: Path
    packing: Config
    method: str
    stored: Mapping[str, SourceTensor]
    read: Callable[[str], Tensor]
    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, name: str) -> None:
        """Takes a tensor with the codes of a matrix, and its companions."""
        stem, _, last = name.rpartition(".")
        dtype = self.stored[name].dtype
        if UNHELD.fullmatch(name):
            raise HotsplitError(
                f"{self.stored[name].file}: tensor {name!r} changes the layer's inputs or outputs,"
                " which no type here holds; take the original checkpoint, or a GGUF of it"
            )
        if last == "qweight":
            is_awq = "awq" in f"{self.method} {self.packing.get('packing_format')}"
            (self._awq if is_awq else self._gptq)(name, stem)
        elif name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            self._mxfp4(name, whole, f"{whole}_scales")
        elif last == "weight_packed" and f"{stem}.weight_global_scale" in self.stored:
            self._nvfp4(name, stem, f"{stem}.weight_global_scale", is_divisor=True)
        elif last == "weight_packed" and dtype == "U8":
            self._mxfp4(name, f"{stem}.weight", f"{stem}.weight_scale")
        elif last == "weight_packed" or (last == "weight" and dtype == "I32"):
            self._packed_integers(name, stem)
        elif dtype == "U8" and last == "weight" and f"{name}_scale_2" in self.stored:
            self._nvfp4(name, stem, f"{name}_scale_2", is_divisor=False)
        elif dtype == "U32":
            self._mlx(name, stem)
        elif dtype == "I8" and f"{name}_scale" in self.stored:
            self._bytes(name)
        elif dtype == "F8_E4M3" and not name.endswith(("scale", "zero_point")):
            self._fp8(name, stem)

    # ---- what all have in common -----------------------------------------------------------------

    def _part(self, name: str, dtypes: Sequence[str], *dims: int) -> tuple[int, ...]:
        """The shape of a part of a packed matrix, which is then used. Raises HotsplitError if there
        is none of these types and numbers of dimensions."""
        self.used.add(name)
        tensor = self.stored.get(name)
        if tensor is None:
            raise HotsplitError(
                f"{self.path.parent}: no tensor {name!r}, without which the packed weights beside"
                " it cannot be read; download the checkpoint again"
            )
        if tensor.dtype not in dtypes or len(tensor.shape) not in dims or 0 in tensor.shape:
            raise HotsplitError(
                f"{tensor.file}: tensor {name!r}, a part of packed weights, is {tensor.dtype} of"
                f" shape {list(tensor.shape)}, wanted {' or '.join(dtypes)} with"
                f" {' or '.join(map(str, dims))} dimensions; download the checkpoint again"
            )
        return tensor.shape

    def _check(
        self, name: str, dtypes: Sequence[str], codes: str, *wanted: tuple[int, ...]
    ) -> None:
        if (shape := self._part(name, dtypes, *sorted({*map(len, wanted)}))) not in wanted:
            raise HotsplitError(
                f"{self.stored[name].file}: tensor {name!r} is {list(shape)}, wanted"
                f" {' or '.join(str(list(each)) for each in wanted)} beside {codes!r};"
                " download the checkpoint again"
            )

    def _number(self, values: Config, key: str, least: int, most: int) -> int:
        value = values.get(key)
        if not isinstance(value, int) or not least <= value <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise HotsplitError(
                f"{self.path}: {key} of packed weights is {shown(value)}, wanted {wanted}; download"
                " it again"
            )
        return value

    def _add(
        self,
        codes: str,
        name: str,
        shape: tuple[int, ...],
        packing: str,
        kinds: tuple[str, ...],
        group_M: np.ndarray,
        read: Callable[[int | None, Rows], Codes],
        levels: np.ndarray | None = None,
        factor: Callable[[int | None], np.float32] | None = None,
    ) -> None:
        file = self.stored[codes].file
        matrix = PackedMatrix(
            label=f"{file}: tensor {name!r}",
            packing=f"{METHODS[self.method]} ({packing})",
            kinds=kinds,
            group_M=group_M,
            read=read,
            levels=levels,
            factor=factor,
            are_rows=codes.endswith("_blocks"),
        )
        if name in self.tensors or (name != codes and name in self.stored):
            raise HotsplitError(
                f"{file}: {name!r} is there both packed ({codes!r}) and as it is; only one of them"
                " can be right: download the checkpoint again"
            )
        self.tensors[name] = SourceTensor(
            file=file,
            shape=shape,
            dtype=(matrix.kind_in(None) or "f16").upper(),
            read=partial(_read_whole, matrix, shape),
            packed=matrix,
        )

    def _rows_of(self, name: str, expert: int | None, rows: Rows) -> np.ndarray:
        """Rows of a stored tensor [N, ...] or [E, N, ...]."""
        tensor = self.read(name)
        return _numbers(tensor if expert is None else tensor[expert], rows)

    # ---- integers --------------------------------------------------------------------------------

    def _gptq(self, name: str, stem: str) -> None:
        """qweight [M bits / 32, N], qzeros [G, N bits / 32], scales [G, N], g_idx [M]."""
        words, num_rows = self._part(name, WORDS, 2)
        scales, zeros, index = f"{stem}.scales", f"{stem}.qzeros", f"{stem}.g_idx"
        has_index = index in self.stored
        groups, _ = self._part(scales, FLOATS, 2)
        # The config may have exceptions for modules.
        width, size = 32 * words // self._number(self.packing, "bits", 2, 8), self._size
        if has_index:
            (width,) = self._part(index, WORDS, 1)
        elif size and (32 * words) % (groups * size) == 0:
            width = groups * size
        bits = min(max(32 * words // max(width, 1), 2), 8)
        self._check(name, WORDS, scales, (-(-width * bits // 32), num_rows))
        self._check(scales, FLOATS, name, (groups, num_rows))
        self._check(zeros, WORDS, name, (groups, num_rows * bits // 32))
        size, group_M = self._groups(name, width, groups)
        if has_index:
            group_M = self._own_groups(index, group_M, groups)
        is_v2 = "v2" in str(self.packing.get("checkpoint_format"))
        layout = self.packing.get("packing_format", "auto_gptq")
        more = 0 if is_v2 or "auto_gptq" not in str(layout) else 1
        is_symmetric = self.packing.get("sym", True) is not False

        def read(expert: int | None, rows: Rows) -> Codes:
            packed = self.read(name).numpy()[:, rows].T
            zeros_GN = unpack_bits(self.read(zeros).numpy(), bits, num_rows)[:, rows]
            zeros_GN = zeros_GN + np.uint8(more) & np.uint8((1 << bits) - 1)
            codes = unpack_bits(packed, bits, width).astype(np.int16)
            scale = _numbers(self.read(scales).T, rows)
            return Codes(codes_NM=codes - np.take(zeros_GN.T, group_M, axis=1), scale_NG=scale)

        what, kinds = _integers(bits, size, is_symmetric=is_symmetric)
        self._add(name, f"{stem}.weight", (num_rows, width), what, kinds, group_M, read)

    def _awq(self, name: str, stem: str) -> None:
        """qweight [M, N / 8], qzeros [G, N / 8], scales [G, N]; eight rows a word."""
        bits = self._number(self.packing, "bits" if "bits" in self.packing else "w_bit", 4, 4)
        width, words = self._part(name, WORDS, 2)
        scales, zeros, num_rows = f"{stem}.scales", f"{stem}.qzeros", 8 * words
        groups, _ = self._part(scales, FLOATS, 2)
        self._check(scales, FLOATS, name, (groups, num_rows))
        is_symmetric = self.packing.get("zero_point", not self.packing.get("sym")) is False
        has_zeros = not is_symmetric or zeros in self.stored
        if has_zeros:
            self._check(zeros, WORDS, name, (groups, words))
        size, group_M = self._groups(name, width, groups)

        def numbers(words: np.ndarray, rows: Rows) -> np.ndarray:
            row_N = np.arange(num_rows)[rows]
            return (words[:, row_N // 8] >> 4 * AWQ_PLACES[row_N % 8] & 15).T.astype(np.int16)

        def read(expert: int | None, rows: Rows) -> Codes:
            zero = (
                np.take(numbers(self.read(zeros).numpy(), rows), group_M, axis=1)
                if has_zeros
                else 8
            )
            codes = numbers(self.read(name).numpy(), rows) - zero
            return Codes(codes_NM=codes, scale_NG=_numbers(self.read(scales).T, rows))

        what, kinds = _integers(bits, size, is_symmetric=is_symmetric)
        self._add(name, f"{stem}.weight", (num_rows, width), what, kinds, group_M, read)

    def _packed_integers(self, name: str, stem: str) -> None:
        """[N, M bits / 32], scales [N, G]; zero points are packed along N."""
        scales, zeros, index = (f"{stem}.weight_{x}" for x in ("scale", "zero_point", "g_idx"))
        *first, num_rows, words = self._part(name, WORDS, 2, 3)
        groups = self._part(scales, FLOATS, 2, 3)[-1]
        own = self._weights_of(stem)
        if self.method == "humming":  # "uint2"
            name_of = str(own.get("b_dtype") or own.get("weight_dtype") or own.get("dtype"))
            own = {"num_bits": int(re.sub(r"\D", "", name_of)[:2] or 0), **own}
        bits = self._number(own, "num_bits", 1, 8)
        wanted = own.get("group_size") or own.get("weight_scale_group_size") or -1
        width = groups * wanted if isinstance(wanted, int) and wanted > 0 else 32 * words // bits
        self._check(name, WORDS, scales, (*first, num_rows, -(-width * bits // 32)))
        self._check(scales, FLOATS, name, (*first, num_rows, groups))
        size, group_M = self._groups(name, width, groups)
        if index in self.stored:
            group_M = self._own_groups(index, group_M, groups)
        has_zeros = own.get("symmetric") is False or zeros in self.stored
        if has_zeros:
            self._check(zeros, WORDS, name, (*first, -(-num_rows * bits // 32), groups))

        def read(expert: int | None, rows: Rows) -> Codes:
            packed = self._rows_of(name, expert, rows)
            zero: np.ndarray | int = 1 << bits - 1
            if has_zeros:
                zeros_GW = self._rows_of(zeros, expert, slice(None)).T
                zeros_NG = unpack_bits(zeros_GW, bits, num_rows)[:, rows].T.astype(np.int16)
                zero = np.take(zeros_NG, group_M, axis=1)
            codes = unpack_bits(packed, bits, width).astype(np.int16) - zero
            return Codes(codes_NM=codes, scale_NG=self._rows_of(scales, expert, rows))

        what, kinds = _integers(bits, size, is_symmetric=not has_zeros)
        shape = (*first, num_rows, width)
        self._add(name, f"{stem}.weight", shape, what, kinds, group_M, read)

    def _bytes(self, name: str) -> None:
        """int8 [N, M], scales of rows, or of groups [N, G]; zero points of the scales' shape."""
        scales, zeros = f"{name}_scale", f"{name}_zero_point"
        where, group_M, of_rows = self._grid(name, scales)
        own = self._weights_of(name.removesuffix(".weight"))
        has_zeros = own.get("symmetric") is False or zeros in self.stored
        if has_zeros:
            self._check(zeros, ("I8",), scales, self.stored[scales].shape)

        def read(expert: int | None, rows: Rows) -> Codes:
            codes = self._rows_of(name, expert, rows).astype(np.int16)
            if has_zeros:
                codes = codes - of_rows(zeros, expert, rows)[:, group_M].astype(np.int16)
            return Codes(codes_NM=codes, scale_NG=of_rows(scales, expert, rows))

        kinds = () if has_zeros else ("q8_0",)
        self._add(name, name, self.stored[name].shape, f"8 bits{where}", kinds, group_M, read)

    def _mlx(self, name: str, stem: str) -> None:
        """uint32 [N, M bits / 32], scales and biases [N, G]; a layer's own bits are under its name.
        Of a mixture, all experts [E, ...] under `switch_mlp`."""
        scales, minima = f"{stem}.scales", f"{stem}.biases"
        found = self.stored.get(scales)
        if minima not in self.stored and found is not None and found.dtype == "U8":
            self._mxfp4(name, name, scales)
            return
        exception = self.packing.get(stem)
        own = {**self.packing, **(exception if isinstance(exception, dict) else {})}
        size = self._number(own, "group_size", 1, 1 << 20)
        bits = self._number(own, "bits", 2, 8)
        *first, num_rows, _ = self._part(name, WORDS, 2, 3)
        groups = self._part(scales, FLOATS, 2, 3)[-1]
        self._check(name, WORDS, scales, (*first, num_rows, -(-groups * size * bits // 32)))
        for each in (scales, minima):
            self._check(each, FLOATS, name, (*first, num_rows, groups))
        width = groups * size

        def read(expert: int | None, rows: Rows) -> Codes:
            codes = unpack_bits(self._rows_of(name, expert, rows), bits, width)
            scale, minimum = (self._rows_of(each, expert, rows) for each in (scales, minima))
            return Codes(codes_NM=codes, scale_NG=scale, minimum_NG=minimum)

        kinds = ("q4_1",) if bits <= 4 else ("q5_1",) if bits == 5 else ()
        what, group_M = f"{bits} bits in groups of {size}", np.arange(width) // size
        if not first or ".switch_mlp." not in name:
            self._add(name, name, (*first, num_rows, width), what, kinds, group_M, read)
            return
        for expert in range(first[0]):

            def of_expert(_: int | None, rows: Rows, own: int = expert) -> Codes:
                return read(own, rows)

            one = name.replace(".switch_mlp.", f".experts.{expert}.")
            self._add(name, one, (num_rows, width), what, kinds, group_M, of_expert)

    # ---- floats ----------------------------------------------------------------------------------

    def _fp8(self, name: str, stem: str) -> None:
        """e4m3 [N, M], with scales of the matrix, of rows, groups or blocks, or of all experts."""
        spellings = f"{name}_scale_inv", f"{name}_scale", f"{stem}.qscale_weight"
        found = [each for each in spellings if each in self.stored]
        scales = found[0] if found else spellings[self.method != "fp8"]
        where, group_M, of_rows = self._grid(name, scales)
        zeros = f"{name}_zero_point"
        if zeros in self.stored:  # of older files of compressed-tensors, all 0
            self.used.add(zeros)
            if bool(self.read(zeros).float().any()):
                raise HotsplitError(
                    f"{self.stored[zeros].file}: tensor {zeros!r} is not all 0; floats with zero"
                    " points cannot be read: take the original checkpoint, or a GGUF of it"
                )

        def read(expert: int | None, rows: Rows) -> Codes:
            codes = self._rows_of(name, expert, rows)
            return Codes(codes_NM=codes, scale_NG=of_rows(scales, expert, rows))

        shape = self.stored[name].shape
        self._add(name, name, shape, f"8-bit floats{where}", ("bf16",), group_M, read)

    def _mxfp4(self, name: str, logical: str, scales: str) -> None:
        """Nibbles, the lower ones of even columns, [N, M / 2] bytes or [N, G, 16]; exponents [N, G]
        of groups of 32."""
        *first, groups = self._part(scales, EXPONENTS, 2, 3)
        count = 4 if self.stored[name].dtype == "U32" else 1
        wanted = (*first, groups * 16 // count), (*first, groups, 16)
        self._check(name, ("U8", "U32"), scales, *wanted)

        def read(expert: int | None, rows: Rows) -> Codes:
            packed = self._rows_of(name, expert, rows)
            codes = unpack_bits(packed.reshape(len(packed), -1), 4, 32 * groups)
            return Codes(codes_NM=codes, scale_NG=_powers(self._rows_of(scales, expert, rows)))

        group_M, shape = np.arange(32 * groups) // 32, (*first, 32 * groups)
        self._add(name, logical, shape, "4-bit floats", ("mxfp4",), group_M, read, E2M1)

    def _nvfp4(self, name: str, stem: str, factor: str, *, is_divisor: bool) -> None:
        """Nibbles as in MXFP4, e4m3 scales [N, G] of groups of 16, and a factor of the matrix."""
        scales = f"{stem}.weight_scale"
        *first, groups = self._part(scales, ("F8_E4M3",), 2)
        self._check(name, ("U8",), scales, (*first, groups * 8))
        self._check(factor, FLOATS, name, (), (1,), (1, 1))

        def whole(expert: int | None) -> np.float32:
            number = self.read(factor).float().reshape(-1).numpy()[0]
            if is_divisor:
                number = np.float32(1) / number if number else np.float32(np.nan)
            return np.float32(number)

        def read(expert: int | None, rows: Rows) -> Codes:
            codes = unpack_bits(self._rows_of(name, expert, rows), 4, 16 * groups)
            return Codes(codes_NM=codes, scale_NG=self._rows_of(scales, expert, rows))

        group_M, shape = np.arange(16 * groups) // 16, (*first, 16 * groups)
        what, logical = "4-bit floats, NVFP4", f"{stem}.weight"
        self._add(name, logical, shape, what, ("nvfp4",), group_M, read, E2M1, whole)

    # ---- groups and scales -----------------------------------------------------------------------

    def _weights_of(self, stem: str) -> Config:
        """What the config says of a module's weights: of compressed-tensors' groups the only one,
        or the first whose targets name the module; last a group of a class of modules."""
        groups = self.packing.get("config_groups")
        if not isinstance(groups, dict):
            return self.packing
        found = [each for each in groups.values() if isinstance(each, dict)]
        named = [each for each in found if any(_names(t, stem) for t in _texts(each, "targets"))]
        classes = [each for each in found if any("." not in t for t in _texts(each, "targets"))]
        weights = next(iter([*named, *classes, *found]), {}).get("weights")
        return weights if isinstance(weights, dict) else {}

    @property
    def _size(self) -> int:
        """The size of groups that the config gives; 0 if it is that of a row, or none."""
        size = self.packing.get("group_size") or self.packing.get("weight_scale_group_size")
        return size if isinstance(size, int) and size > 0 else 0

    def _groups(self, name: str, width: int, count: int) -> tuple[int, np.ndarray]:
        """The size of groups (0 if it is that of a row), and each column's group, if `count` of
        them follow one another."""
        size = self._size
        if count == 1 and not size:
            return 0, np.zeros(width, np.int64)
        if not size or -(-width // size) != count:
            if count < 1 or width % count:
                raise HotsplitError(
                    f"{self.stored[name].file}: tensor {name!r} has {width} columns in {count}"
                    " groups, wanted groups of one size; download the checkpoint again"
                )
            size = width // count
        return size, np.arange(width) // size

    def _own_groups(self, index: str, group_M: np.ndarray, count: int) -> np.ndarray:
        """The group of each column by a tensor; zeros mean that there is no order but theirs, as in
        text-generation-inference."""
        self._check(index, WORDS, index, group_M.shape)
        index_M = self.read(index).numpy()
        if index_M.min() < 0 or index_M.max() >= count:
            raise HotsplitError(
                f"{self.stored[index].file}: tensor {index!r} has groups from {index_M.min()} to"
                f" {index_M.max()}, wanted 0 to {count - 1}; download the checkpoint again"
            )
        return index_M if index_M.any() else group_M

    def _grid(
        self, name: str, scales: str
    ) -> tuple[str, np.ndarray, Callable[[str, int | None, Rows], np.ndarray]]:
        """Words on the scales of a matrix [N, M] or [E, N, M], the group of each column, and what
        reads the scales of some rows."""
        *first, num_rows, width = self._part(name, ("F8_E4M3", "I8"), 2, 3)
        shape = self._part(scales, (*FLOATS, *EXPONENTS), 0, 1, 2, 3)
        own = self._weights_of(name.removesuffix(".weight"))
        stated = own.get("weight_block_size") or own.get("block_structure")
        size = stated or (128, 128)
        if not isinstance(size, list | tuple) or [*map(type, size)] != [int, int] or min(size) < 1:
            raise HotsplitError(
                f"{self.path}: the size of blocks is {shown(size)}, wanted two numbers; download it"
                " again"
            )
        are_of_experts = bool(first) and shape[: len(first)] == (*first,)
        of_one = shape[len(first) :] if are_of_experts else shape
        tall, wide, where = 1, width, " with a scale a row"
        of_blocks = -(-num_rows // size[0]), -(-width // size[1])
        if of_one == of_blocks:
            (tall, wide), where = size, f" in blocks of {size[0]} x {size[1]}"
        elif math.prod(of_one) == 1:
            if stated is not None:  # a damaged one
                self._check(scales, (*FLOATS, *EXPONENTS), name, (*first, *of_blocks))
            tall, where = num_rows, " with one scale"
        elif of_one[:1] == (num_rows,) and len(of_one) == 2 and width % of_one[1] == 0:
            wide = width // of_one[1]
            where = where if wide == width else f" in groups of {wide}"
        elif of_one != (num_rows,):
            self._check(scales, FLOATS, name, (*first, num_rows, 1), (*first, 1))
        group_M = np.arange(width) // wide

        def of_rows(name: str, expert: int | None, rows: Rows) -> np.ndarray:
            tensor = self.read(name)
            tensor = tensor[expert] if are_of_experts else tensor
            numbers = _numbers(tensor.reshape(-1, group_M[-1] + 1), slice(None))
            return _powers(numbers)[np.arange(num_rows)[rows] // tall]

        return where, group_M, of_rows


def _read_whole(matrix: PackedMatrix, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return matrix.values()[0]
    return torch.stack([matrix.values(expert=expert)[0] for expert in range(shape[0])])


def _numbers(tensor: Tensor, rows: Rows) -> np.ndarray:
    """Rows of integers as they are, of floats as f32."""
    if not tensor.dtype.is_floating_point:
        return tensor.numpy()[rows]
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    chosen = np.ascontiguousarray(raw.numpy()[rows])  # torch does not index all of these types
    return torch.from_numpy(chosen).view(tensor.dtype).float().numpy()


def _powers(scales: np.ndarray) -> np.ndarray:
    """Bytes as the powers of two of which they are the biased exponents, 255 as NaN; other scales
    as they are."""
    if scales.dtype != np.uint8:
        return scales
    powers = np.ldexp(np.float32(1), scales.astype(np.int32).clip(max=254) - 127)
    return np.where(scales == 255, np.float32(np.nan), powers)


def _integers(bits: int, size: int, *, is_symmetric: bool) -> tuple[str, tuple[str, ...]]:
    """Words, and the types that hold codes less the middle, or less any zero point."""
    most = 1 << bits - 1 if is_symmetric else (1 << bits) - 1
    fitting = (("q4_0", 8), ("q5_0", 16), ("q8_0", 128))
    # -most is a code only if it is symmetric.
    kinds = tuple(k for k, end in fitting if most <= end - (not is_symmetric))[:1]
    kinds = ("q2_0", *kinds) if bits == 2 and is_symmetric else kinds
    zeros = "" if is_symmetric else " and zero points"
    groups = f"in groups of {size}" if size else "with a scale a row"
    return f"{bits} bits {groups}{zeros}", kinds


def _texts(values: Config, key: str) -> Iterable[str]:
    found = values.get(key)
    return (each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def _names(target: str, stem: str) -> bool:
    """Whether a target of compressed-tensors is this module; classes of modules are none."""
    if not target.startswith("re:"):
        return stem == target or stem.endswith(f".{target}")
    try:
        return re.match(target[3:], stem) is not None
    except re.error:
        return False
