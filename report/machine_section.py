"""The section with the machine's measured figures, on which predictions rest."""

from hotsplit.artifacts.machine_file import Figure, Machine
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
    tables = (_cpu_table(machine), *_gpu_tables(machine), *_cost_tables(machine))
    return Section("machine", "Machine", lead, tables=tables, missing=(doubt,) if doubtful else ())


def _cpu_table(machine: Machine) -> Table:
    rows = [
        ("processor", machine.cpu_name),
        ("threads", str(machine.num_threads)),
        (
            "memory",
            f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.free_bytes)} free",
        ),
        ("our row products", f"{machine.best_cpu_bandwidth_gb_per_s:.1f} GB/s at best"),
    ]
    if machine.cpu_sum_gb_per_s:
        best = max(figure.best for figure in machine.cpu_sum_gb_per_s.values())
        rows.append(("torch's sum", f"{best:.1f} GB/s at best"))
    return Table("CPU", (), tuple(rows), num_texts=2)


def _gpu_tables(machine: Machine) -> list[Table]:
    tables = []
    for number, gpu in enumerate(machine.gpus):
        rows = (
            ("name", gpu.name),
            ("figures", gpu.source),
            ("memory", f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"),
            ("bandwidth", _rate(gpu.bandwidth_gb_per_s)),
            ("host to device", _rate(gpu.host_to_device_gb_per_s)),
            ("start of a kernel", _time(gpu.launch_s)),
            ("copy", _time(gpu.copy_latency_s)),
            ("hand-over", _time(gpu.hand_over_s)),
            ("run of layers on the CPU", _time(gpu.cpu_run_s)),
            ("token", _time(gpu.token_s)),
            ("kernel at least", _time(gpu.kernel_s)),
        )
        tables.append(Table(f"GPU {number}", (), rows, num_texts=2))
    return tables


def _cost_tables(machine: Machine) -> list[Table]:
    costs = machine.cpu_costs
    if costs is None:
        return []
    rows = tuple(
        (
            kind,
            _rate(figure),
            _rate(costs.chosen_rows_gb_per_s[kind]) if kind in costs.chosen_rows_gb_per_s else NONE,
        )
        for kind, figure in costs.all_rows_gb_per_s.items()
    )
    fixed = [("a token", _time(costs.token_s)), ("the cache", _rate(costs.kv_gb_per_s))]
    fixed += [(f"a layer, {mode}", _time(figure)) for mode, figure in costs.layer_s.items()]
    return [
        Table("CPU rates by type", ("type", "all rows", "a tenth of them"), rows, is_folded=True),
        Table("Other CPU costs", (), tuple(fixed), is_folded=True),
    ]


def _rate(figure: Figure) -> str:
    return _told(figure, f"{figure.best:.1f} GB/s")


def _time(figure: Figure) -> str:
    return _told(figure, f"{1e6 * figure.best:.3g} µs")


def _told(figure: Figure, value: str) -> str:
    return f"{value}, half within {figure.spread:.0%}" if figure.rounds else value
