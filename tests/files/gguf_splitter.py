"""Divides a GGUF into several files with gguf's own reader and writer, as large models are
published."""

from pathlib import Path

import gguf


def split_gguf(
    source: Path, stem: Path, num_parts: int, *, small_first: bool = False
) -> list[Path]:
    """Writes STEM-00001-of-0000N.gguf and so on; with `small_first`, part 1 has keys alone."""
    reader = gguf.GGUFReader(source)
    with_tensors = num_parts - small_first
    writer = gguf.GGUFWriter(
        stem.with_name(f"{stem.name}.gguf"),
        reader.fields["general.architecture"].contents(),
        split_max_tensors=-(-len(reader.tensors) // with_tensors),
        small_first_shard=small_first,
    )
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        values = field.contents()
        if kind == gguf.GGUFValueType.ARRAY and inner[0] == gguf.GGUFValueType.STRING:
            values = [bytes(field.parts[place]) for place in field.data]
        writer.add_key_value(name, values, kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(stem.parent.glob(f"{stem.name}-*.gguf"))
    assert len(parts) == num_parts
    return parts
