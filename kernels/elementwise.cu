// The element-wise kernels of the CUDA device, each for f32, f64, bf16 and f16.
//
// All of them compute in the accumulator's type (f32, or f64 for f64) and round once. A thread takes several elements in a stride of
// the whole grid, so that any grid serves any length. `CUDA_NO_HALF` is never set: the headers are CUDA's own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned long long u64;

// Widening to and rounding from the accumulator.
template <typename T> struct Number;
template <> struct Number<float> {
    typedef float Wide;
    static __device__ float widen(float x) { return x; }
    static __device__ float narrow(float x) { return x; }
};
template <> struct Number<double> {
    typedef double Wide;
    static __device__ double widen(double x) { return x; }
    static __device__ double narrow(double x) { return x; }
};
template <> struct Number<__nv_bfloat16> {
    typedef float Wide;
    static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
};
template <> struct Number<__half> {
    typedef float Wide;
    static __device__ float widen(__half x) { return __half2float(x); }
    static __device__ __half narrow(float x) { return __float2half_rn(x); }
};

#define FIRST (blockIdx.x * (u64)blockDim.x + threadIdx.x)
#define STRIDE (gridDim.x * (u64)blockDim.x)

// out[i] = parts[0][i] + parts[1][i] + …, in that order, one rounding; or the largest, of which a NaN stays.
template <typename T> __device__ void combine(const T *const *parts, u64 ranks, u64 count, int largest, T *out) {
    typedef Number<T> N;
    for (u64 i = FIRST; i < count; i += STRIDE) {
        typename N::Wide value = N::widen(parts[0][i]);
        for (u64 rank = 1; rank < ranks; ++rank) {
            typename N::Wide next = N::widen(parts[rank][i]);
            if (!largest) {
                value += next;
            } else if (next > value || next != next) {
                value = next;
            }
        }
        out[i] = N::narrow(value);
    }
}

// rows[r][c] += bias[c]
template <typename T> __device__ void add_bias(const T *bias, u64 width, T *rows, u64 count) {
    typedef Number<T> N;
    for (u64 i = FIRST; i < count; i += STRIDE) {
        rows[i] = N::narrow(N::widen(rows[i]) + N::widen(bias[i % width]));
    }
}

// out[c] += Σ_r rows[r][c], rows in order: a thread a column, so that neighbours read neighbours.
template <typename T>
__device__ void add_column_sums(const T *rows, u64 height, u64 width, typename Number<T>::Wide *out) {
    for (u64 c = FIRST; c < width; c += STRIDE) {
        typename Number<T>::Wide sum = 0;
        for (u64 r = 0; r < height; ++r) {
            sum += Number<T>::widen(rows[r * width + c]);
        }
        out[c] += sum;
    }
}

// target[i] += factor · source[i], in double precision where either side is.
template <typename S, typename T> __device__ void scaled_add(double factor, const S *source, T *target, u64 count) {
    for (u64 i = FIRST; i < count; i += STRIDE) {
        if (sizeof(S) == 8 || sizeof(T) == 8) {
            double sum = (double)Number<T>::widen(target[i]) + factor * (double)Number<S>::widen(source[i]);
            target[i] = Number<T>::narrow((typename Number<T>::Wide)sum);
        } else {
            float sum = (float)Number<T>::widen(target[i]) + (float)factor * (float)Number<S>::widen(source[i]);
            target[i] = Number<T>::narrow((typename Number<T>::Wide)sum);
        }
    }
}

// target[i] = source[i], rounded to nearest even.
template <typename S, typename T> __device__ void cast(const S *source, T *target, u64 count) {
    for (u64 i = FIRST; i < count; i += STRIDE) {
        target[i] = Number<T>::narrow((typename Number<T>::Wide)Number<S>::widen(source[i]));
    }
}

#define ONE(name, T)                                                                                                     \
    extern "C" __global__ void combine_##name(const T *const *parts, u64 ranks, u64 count, int largest, T *out) {        \
        combine<T>(parts, ranks, count, largest, out);                                                                   \
    }                                                                                                                    \
    extern "C" __global__ void add_bias_##name(const T *bias, u64 width, T *rows, u64 count) {                           \
        add_bias<T>(bias, width, rows, count);                                                                           \
    }                                                                                                                    \
    extern "C" __global__ void add_column_sums_##name(const T *rows, u64 height, u64 width, Number<T>::Wide *out) {      \
        add_column_sums<T>(rows, height, width, out);                                                                    \
    }

#define TWO(from, S, to, T)                                                                                              \
    extern "C" __global__ void scaled_add_##from##_##to(double factor, const S *source, T *target, u64 count) {          \
        scaled_add<S, T>(factor, source, target, count);                                                                 \
    }                                                                                                                    \
    extern "C" __global__ void cast_##from##_##to(const S *source, T *target, u64 count) {                               \
        cast<S, T>(source, target, count);                                                                               \
    }

#define FROM(from, S)                                                                                                    \
    ONE(from, S)                                                                                                         \
    TWO(from, S, f32, float)                                                                                             \
    TWO(from, S, f64, double)                                                                                            \
    TWO(from, S, bf16, __nv_bfloat16)                                                                                    \
    TWO(from, S, f16, __half)

FROM(f32, float)
FROM(f64, double)
FROM(bf16, __nv_bfloat16)
FROM(f16, __half)
