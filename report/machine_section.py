"""The section with the machine's measured figures, on which predictions rest."""

from hotsplit.report.artifacts import Artifacts
from hotsplit.report.page import NONE, Missing, Names, Section, Table
from hotsplit.system.sizes import format_bytes


def machine_section(found: Artifacts, names: Names) -> Section:
    machine = found.machine
    lead = "The figures that predictions rest on: the best of several rounds, and the middle half."
    if machine is None:
        return Section("machine", "Machine", lead, missing=(names.no_machine,))
    doubtful = sum(figure.is_doubtful for figure in machine.figures.values())
    doubt = Missing(
        f"{doubtful} of {len(machine.figures)} figures varied by more than a quarter while"
        " they were measured: calibrate again when the machine is idle.",
        f"hotsplit calibrate -o {names.machine} --force",
    )
    facts = [
        ("processor", machine.cpu_name, f"{machine.num_threads} threads"),
        ("memory", format_bytes(machine.memory_bytes), f"{format_bytes(machine.free_bytes)} free"),
    ]
    for number, gpu in enumerate(machine.gpus):
        memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
        facts.append((f"GPU {number}", gpu.name, f"{memory}; {gpu.source}"))
    figures = tuple(
        (name, f"{figure.best:.4g}", f"{figure.spread:.0%}" if figure.rounds else NONE)
        for name, figure in machine.figures.items()
    )
    head = ("rates in GB/s, times in s", "best", "half within")
    tables = (
        Table("Processors and memory", (), tuple(facts), num_texts=3),
        Table("Figures", head, figures, is_folded=True),
    )
    return Section("machine", "Machine", lead, tables=tables, missing=(doubt,) if doubtful else ())
