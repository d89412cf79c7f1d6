// The kernels of kernels/*.cu, compiled for the host: a thread of a block is a call, or, where the block synchronises, a
// coroutine; blocks run one after another.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local

struct Dim3 {
    unsigned x, y, z;
};
static thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

typedef void (*Body)(void **);
static thread_local Body body;
static thread_local void **arguments;
static thread_local ucontext_t scheduler;
static thread_local ucontext_t *coroutine;
static thread_local bool finished;
static thread_local int vote;

static void entry() {
    body(arguments);
    finished = true;
    swapcontext(coroutine, &scheduler);
}

// One round of a block's threads is up to the next __syncthreads.
static void cooperate(unsigned threads) {
    const size_t STACK = 64 << 10;
    static thread_local std::vector<ucontext_t> contexts;
    static thread_local std::vector<char> stacks;
    contexts.resize(threads);
    stacks.resize(threads * STACK);
    std::vector<char> done(threads);
    for (unsigned t = 0; t < threads; ++t) {
        getcontext(&contexts[t]);
        contexts[t].uc_stack.ss_sp = &stacks[t * STACK];
        contexts[t].uc_stack.ss_size = STACK;
        contexts[t].uc_link = nullptr;
        makecontext(&contexts[t], entry, 0);
    }
    for (unsigned left = threads; left > 0;) {
        unsigned ended = 0;
        for (unsigned t = 0; t < threads; ++t) {
            if (!done[t]) {
                threadIdx = {t, 0, 0};
                finished = false;
                coroutine = &contexts[t];
                swapcontext(&scheduler, coroutine);
                ended += done[t] = finished;
            }
        }
        if (ended != 0 && ended != left) {
            fprintf(stderr, "cuda-sim: some threads of a block wait in __syncthreads, which others have left behind\n");
            abort();
        }
        left -= ended;
    }
}

static void run(Body of, void **with, unsigned grid, unsigned block, bool cooperative) {
    body = of;
    arguments = with;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    for (unsigned b = 0; b < grid; ++b) {
        blockIdx = {b, 0, 0};
        if (cooperative) {
            cooperate(block);
            continue;
        }
        coroutine = nullptr;
        for (unsigned t = 0; t < block; ++t) {
            threadIdx = {t, 0, 0};
            body(arguments);
        }
    }
}

} // namespace shim

static inline void __syncthreads() {
    if (!shim::coroutine) {
        fprintf(stderr, "cuda-sim: a kernel synchronises that is not listed as cooperative\n");
        abort();
    }
    swapcontext(shim::coroutine, &shim::scheduler);
}

static inline int __syncthreads_or(int predicate) {
    shim::vote |= predicate != 0;
    __syncthreads();
    int result = shim::vote;
    __syncthreads();
    shim::vote = 0;
    __syncthreads();
    return result;
}

static inline unsigned long long atomicMin(unsigned long long *at, unsigned long long value) {
    unsigned long long old = *at;
    *at = std::min(old, value);
    return old;
}

struct Bf16;
struct F16;
static float widened(Bf16 x);
static float widened(F16 x);
static Bf16 rounded_to_bf16(float value);
static F16 rounded_to_f16(float value);
static float minus_infinity();

#include "../../kernels/number.cuh"
#include "halves.h"
#include "../../kernels/elementwise.cu"
#include "../../kernels/tokens.cu"

// A kernel as the simulator sees it.
struct Entry {
    const char *name;
    // The sizes of its parameters.
    const uint32_t *sizes;
    uint32_t parameters;
    void (*launch)(void **, unsigned grid, unsigned block);
};

template <auto K, bool COOPERATIVE> struct Kernel;
template <typename... A, void (*K)(A...), bool COOPERATIVE> struct Kernel<K, COOPERATIVE> {
    static constexpr uint32_t SIZES[] = {sizeof(A)...};

    template <size_t... I> static void call(void **p, std::index_sequence<I...>) {
        K(*(std::remove_cv_t<A> *)p[I]...);
    }
    static void body(void **p) { call(p, std::index_sequence_for<A...>{}); }
    static void launch(void **p, unsigned grid, unsigned block) { shim::run(body, p, grid, block, COOPERATIVE); }
    static Entry entry(const char *name) { return {name, SIZES, sizeof...(A), launch}; }
};

#define PLAIN(kernel) Kernel<kernel, false>::entry(#kernel),
#define COOPERATIVE(kernel) Kernel<kernel, true>::entry(#kernel),
#define ENTRIES(T)                                                                                                       \
    PLAIN(combine_##T)                                                                                                   \
    PLAIN(add_bias_##T)                                                                                                  \
    COOPERATIVE(add_column_sums_##T)                                                                                     \
    PLAIN(scaled_add_##T##_f32)                                                                                          \
    PLAIN(scaled_add_##T##_f64)                                                                                          \
    PLAIN(scaled_add_##T##_bf16)                                                                                         \
    PLAIN(scaled_add_##T##_f16)                                                                                          \
    PLAIN(cast_##T##_f32)                                                                                                \
    PLAIN(cast_##T##_f64)                                                                                                \
    PLAIN(cast_##T##_bf16)                                                                                               \
    PLAIN(cast_##T##_f16)                                                                                                \
    PLAIN(gather_rows_##T)                                                                                               \
    COOPERATIVE(scatter_add_rows_##T)                                                                                    \
    COOPERATIVE(row_max_##T)                                                                                             \
    COOPERATIVE(softmax_sums_##T)                                                                                        \
    PLAIN(cross_entropy_grad_##T)

static const Entry KERNELS[] = {ENTRIES(f32) ENTRIES(f64) ENTRIES(bf16) ENTRIES(f16) PLAIN(cross_entropy_loss_f32)
                                    PLAIN(cross_entropy_loss_f64) PLAIN(find_outside_i64)};

extern "C" const Entry *cuda_sim_kernels(size_t *count) {
    *count = sizeof(KERNELS) / sizeof(KERNELS[0]);
    return KERNELS;
}
