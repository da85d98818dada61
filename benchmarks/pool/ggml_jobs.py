"""Times llama.cpp's thread pool, in a Python that has llama_cpp, for ../pool_times.py:

    python ggml_jobs.py THREADS BYTES PAUSE_US ...

A job is a graph of one node: a row product with BYTES of f32 weights that no other job of the last
64 MiB has read, or a sum of one value (BYTES 0). Before it the caller computes for PAUSE_US
microseconds, or sleeps as long if it is negative. Prints for each pause the median and the 90th
percentile in nanoseconds, and at last those of a node within a graph of NODES such nodes, which
share one start."""

import ctypes
import sys
import time

from llama_cpp import _ggml

NODES = 100
MEMORY = 64 << 20
WARM_UP, FEWEST_JOBS, MOST_JOBS, LIMIT_S = 5, 20, 2000, 0.25
COLUMNS = 256
F32 = 0

base = ctypes.CDLL(_ggml.libggml._name.replace("libggml.so", "libggml-base.so"))
cpu = ctypes.CDLL(_ggml.libggml._name.replace("libggml.so", "libggml-cpu.so"))
pointer, size = ctypes.c_void_p, ctypes.c_int64


class InitParams(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_size_t), ("memory", pointer), ("no_alloc", ctypes.c_bool)]


class Plan(ctypes.Structure):
    """ggml_cplan, with room for fields of later versions."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", pointer),
        ("num_threads", ctypes.c_int),
        ("more", ctypes.c_uint64 * 16),
    ]


class PoolParams(ctypes.Structure):
    """ggml_threadpool_params, with room for fields of later versions."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


def function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, list(arguments)
    return found


init = function(base, "ggml_init", pointer, InitParams)
new_2d = function(base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, size, size)
mul_mat = function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
add = function(base, "ggml_add", pointer, pointer, pointer, pointer)
graph_overhead = function(base, "ggml_graph_overhead", ctypes.c_size_t)
new_graph = function(base, "ggml_new_graph", pointer, pointer)
expand = function(base, "ggml_build_forward_expand", None, pointer, pointer)
set_zero = function(base, "ggml_set_zero", pointer, pointer)
pool_params = function(
    base, "ggml_threadpool_params_init", None, ctypes.POINTER(PoolParams), ctypes.c_int
)
new_pool = function(cpu, "ggml_threadpool_new", pointer, ctypes.POINTER(PoolParams))
plan = function(cpu, "ggml_graph_plan", Plan, pointer, ctypes.c_int, pointer)
compute = function(cpu, "ggml_graph_compute", ctypes.c_int, pointer, ctypes.POINTER(Plan))


class Jobs:
    """Graphs of some nodes each."""

    def __init__(self, threads: int, num_bytes: int, nodes: int) -> None:
        rows = max(1, num_bytes // 4 // COLUMNS)
        count = MEMORY // (num_bytes * nodes) if num_bytes else 1
        overheads = count * (graph_overhead() + nodes * 4096)
        context = init(InitParams(2 * MEMORY + overheads, None, False))
        params = PoolParams()
        pool_params(ctypes.byref(params), threads)
        pool = new_pool(ctypes.byref(params))
        x = set_zero(new_2d(context, F32, COLUMNS if num_bytes else 1, 1))
        self.jobs, self.work = [], []
        for _ in range(count):
            graph = new_graph(context)
            for _ in range(nodes):
                one = new_2d(context, F32, COLUMNS, rows) if num_bytes else x
                node = mul_mat(context, set_zero(one), x) if num_bytes else add(context, one, x)
                expand(graph, node)
            found = plan(graph, threads, pool)
            self.work.append(ctypes.create_string_buffer(found.work_size + 64))
            found.work_data = ctypes.addressof(self.work[-1])
            self.jobs.append((graph, found))
        self.next = 0

    def run_ns(self) -> int:
        graph, found = self.jobs[self.next % len(self.jobs)]
        self.next += 1
        began = time.perf_counter_ns()
        status = compute(graph, ctypes.byref(found))
        passed = time.perf_counter_ns() - began
        assert status == 0, status
        return passed


def wait_for(pause_us: int) -> None:
    if pause_us < 0:
        return time.sleep(-pause_us / 1e6)
    end = time.perf_counter_ns() + 1000 * pause_us
    while time.perf_counter_ns() < end:
        pass
    return None


def figures(jobs: Jobs, pause_us: int, nodes: int) -> str:
    times, began = [], time.perf_counter()
    while len(times) < FEWEST_JOBS or (
        len(times) < MOST_JOBS and time.perf_counter() - began < LIMIT_S
    ):
        wait_for(pause_us)
        times.append(jobs.run_ns() // nodes)
    times = sorted(times[WARM_UP:])
    return f"{times[len(times) // 2]} {times[len(times) * 9 // 10]}"


def main() -> None:
    threads, num_bytes = int(sys.argv[1]), int(sys.argv[2])
    one = Jobs(threads, num_bytes, 1)
    for pause in sys.argv[3:]:
        print(figures(one, int(pause), 1))
    print(figures(Jobs(threads, num_bytes, NODES), 0, NODES))


if __name__ == "__main__":
    main()
