"""The probe, which checks a level before it is used, notices faulty kernels.

Here it is compiled with the generic kernels, one of which at a time is made to do nothing; those
that weigh keys are also made to ignore the keys."""

import shutil
import subprocess

import pytest
from cpp_compiler import KERNELS, compiled

MAIN = """
#include <cstdio>
#include <cstring>
#include "probe.h"

static int64_t nothing() { return 0; }

// Ignores what the keys say: all weights are equal, with the right sum.
template <int KIND>
static void weigh_alike(const AttendPart& part) {
    kernels_generic.weigh_keys[KIND](part);
    for (int64_t q = 0; q < part.num_queries; ++q)
        for (int32_t i = 0; i < part.count[q]; ++i)
            part.score[q * padded_part(part.n) + i] = part.total[q] / part.count[q];
}

// Ends the process that tries it.
static void faults(const Rows&, const Input&, float*, int64_t, int64_t, int64_t) {
    __builtin_trap();
}

// Right only for the first vector.
static void errs(
        const Rows& rows, const Input& x, float* y, int64_t stride, int64_t a0, int64_t a1) {
    kernels_generic.dot_rows[KIND_F32](rows, x.part(0, 1), y, stride, a0, a1);
    for (int64_t t = 1; t < x.count; ++t)
        for (int64_t a = a0; a < a1; ++a) y[t * stride + a] = 0.0f;
}

static void try_products() {
    Kernels tried = kernels_generic;
    tried.dot_rows[KIND_F32] = faults;
    if (runs_here(tried, kernels_generic)) std::printf("products that fault\\n");
    tried.dot_rows[KIND_F32] = errs;
    if (runs_here(tried, kernels_generic)) std::printf("products of the first vector alone\\n");
}

template <int KIND>
static void try_weighing() {
    Kernels tried = kernels_generic;
    tried.weigh_keys[KIND] = weigh_alike<KIND>;
    if (runs_here(tried, kernels_generic)) std::printf("equal weights, kind %d\\n", KIND);
}

int main() {
    constexpr size_t NUM_SLOTS = sizeof(Kernels) / sizeof(void*);
    void* slot[NUM_SLOTS];
    static_assert(sizeof slot == sizeof(Kernels));
    std::memcpy(slot, &kernels_generic, sizeof slot);
    int num_tried = 0;
    for (size_t i = 0; i <= NUM_SLOTS; ++i) {
        if (i < NUM_SLOTS && !slot[i]) continue;
        Kernels tried = kernels_generic;
        if (i < NUM_SLOTS) {
            auto* broken = &nothing;
            char* place = reinterpret_cast<char*>(&tried) + i * sizeof(void*);
            std::memcpy(place, &broken, sizeof broken);
        }
        const bool accepted = runs_here(tried, kernels_generic);
        num_tried += i < NUM_SLOTS;
        if (accepted != (i == NUM_SLOTS)) std::printf("slot %zu of %zu\\n", i, NUM_SLOTS);
    }
    try_products();
    try_weighing<0>(), try_weighing<1>(), try_weighing<2>(), try_weighing<3>(), try_weighing<4>();
    static_assert(NUM_CACHE_KINDS == 5);
    std::printf("tried %d\\n", num_tried);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_kernel_that_does_nothing_is_noticed_whichever_it_is(tmp_path):
    (tmp_path / "main.cpp").write_text(MAIN)
    objects = [
        compiled(tmp_path / "main.cpp", tmp_path / "main.o", f"-I{KERNELS}"),
        compiled(KERNELS / "probe.cpp", tmp_path / "probe.o"),
        compiled(KERNELS / "rows_generic.cpp", tmp_path / "rows_generic.o"),
    ]
    subprocess.run(["g++", *objects, "-o", tmp_path / "probe"], check=True)
    done = subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True)
    *missed, tried = done.stdout.splitlines()
    assert missed == []
    assert int(tried.split()[1]) > 80
