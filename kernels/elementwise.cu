// Element by element: sums over ranks, biases, gradients, casts; each for f32, f64, bf16 and f16.
//
// All of them compute in the accumulator's type and round once.

// Addresses of up to 256 summands, by value: what fits into the 4 KiB of a kernel's parameters that every card takes.
struct Parts {
    u64 at[256];
};

template <typename T, int LANES>
__device__ void combine_lanes(const Parts &parts, u64 ranks, u64 begin, u64 count, int largest, T *out) {
    typedef Number<T> N;
    typedef Lanes<T, LANES> Some;
    for (u64 i = begin / LANES + FIRST; i < count / LANES; i += STRIDE) {
        Some some = ((const Some *)parts.at[0])[i];
        typename N::Wide value[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            value[lane] = N::widen(some.at[lane]);
        }
        for (u64 rank = 1; rank < ranks; ++rank) {
            some = ((const Some *)parts.at[rank])[i];
            for (int lane = 0; lane < LANES; ++lane) {
                typename N::Wide next = N::widen(some.at[lane]);
                value[lane] = largest ? larger(value[lane], next) : value[lane] + next;
            }
        }
        for (int lane = 0; lane < LANES; ++lane) {
            some.at[lane] = N::narrow(value[lane]);
        }
        ((Some *)out)[i] = some;
    }
}

// out[i] = parts[0][i] + parts[1][i] + …, in that order, one rounding; or the largest, of which a NaN stays.
template <typename T> __device__ void combine(const Parts &parts, u64 ranks, u64 count, int largest, T *out) {
    const int LANES = Fill<T, T>::LANES;
    bool packed = aligned<T, LANES>(out);
    for (u64 rank = 0; rank < ranks; ++rank) {
        packed = packed && aligned<T, LANES>((const T *)parts.at[rank]);
    }
    u64 whole = packed ? count - count % LANES : 0;
    combine_lanes<T, LANES>(parts, ranks, 0, whole, largest, out);
    combine_lanes<T, 1>(parts, ranks, whole, count, largest, out);
}

template <typename T, int LANES> __device__ void add_bias_lanes(const T *bias, u64 width, T *rows, u64 count) {
    typedef Number<T> N;
    typedef Lanes<T, LANES> Some;
    for (u64 i = FIRST; i < count / LANES; i += STRIDE) {
        Some row = ((Some *)rows)[i], some = ((const Some *)bias)[i % (width / LANES)];
        for (int lane = 0; lane < LANES; ++lane) {
            row.at[lane] = N::narrow(N::widen(row.at[lane]) + N::widen(some.at[lane]));
        }
        ((Some *)rows)[i] = row;
    }
}

// rows[r][c] += bias[c]
template <typename T> __device__ void add_bias(const T *bias, u64 width, T *rows, u64 count) {
    const int LANES = Fill<T, T>::LANES;
    if (width % LANES == 0 && aligned<T, LANES>(bias) && aligned<T, LANES>(rows)) {
        add_bias_lanes<T, LANES>(bias, width, rows, count);
    } else {
        add_bias_lanes<T, 1>(bias, width, rows, count);
    }
}

// out[c] += Σ_r rows[r][c]. A block has 32 columns and 8 strands of rows, which are summed in their order: the same bits every time.
template <typename T>
__device__ void add_column_sums(const T *rows, u64 height, u64 width, typename Number<T>::Wide *out) {
    const unsigned COLUMNS = 32, STRANDS = BLOCK / COLUMNS;
    __shared__ typename Number<T>::Wide sums[BLOCK];
    unsigned column = threadIdx.x % COLUMNS, strand = threadIdx.x / COLUMNS;
    for (u64 first = blockIdx.x * (u64)COLUMNS; first < width; first += gridDim.x * (u64)COLUMNS) {
        u64 c = first + column;
        typename Number<T>::Wide sum = 0;
        for (u64 r = strand; c < width && r < height; r += STRANDS) {
            sum += Number<T>::widen(rows[r * width + c]);
        }
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (strand == 0 && c < width) {
            for (unsigned other = 1; other < STRANDS; ++other) {
                sum += sums[other * COLUMNS + column];
            }
            out[c] += sum;
        }
        __syncthreads();
    }
}

template <typename S, typename T, int LANES>
__device__ void scaled_add_lanes(double factor, const S *source, T *target, u64 begin, u64 count) {
    for (u64 i = begin / LANES + FIRST; i < count / LANES; i += STRIDE) {
        Lanes<S, LANES> from = ((const Lanes<S, LANES> *)source)[i];
        Lanes<T, LANES> to = ((Lanes<T, LANES> *)target)[i];
        for (int lane = 0; lane < LANES; ++lane) {
            if (sizeof(S) == 8 || sizeof(T) == 8) {
                double sum = (double)Number<T>::widen(to.at[lane]) + factor * (double)Number<S>::widen(from.at[lane]);
                to.at[lane] = Number<T>::narrow((typename Number<T>::Wide)sum);
            } else {
                float sum = (float)Number<T>::widen(to.at[lane]) + (float)factor * (float)Number<S>::widen(from.at[lane]);
                to.at[lane] = Number<T>::narrow((typename Number<T>::Wide)sum);
            }
        }
        ((Lanes<T, LANES> *)target)[i] = to;
    }
}

// target[i] += factor · source[i], in double precision where either side is.
template <typename S, typename T> __device__ void scaled_add(double factor, const S *source, T *target, u64 count) {
    const int LANES = Fill<S, T>::LANES;
    bool packed = aligned<S, LANES>(source) && aligned<T, LANES>(target);
    u64 whole = packed ? count - count % LANES : 0;
    scaled_add_lanes<S, T, LANES>(factor, source, target, 0, whole);
    scaled_add_lanes<S, T, 1>(factor, source, target, whole, count);
}

template <typename S, typename T, int LANES>
__device__ void cast_lanes(const S *source, T *target, u64 begin, u64 count) {
    for (u64 i = begin / LANES + FIRST; i < count / LANES; i += STRIDE) {
        Lanes<S, LANES> from = ((const Lanes<S, LANES> *)source)[i];
        Lanes<T, LANES> to;
        for (int lane = 0; lane < LANES; ++lane) {
            to.at[lane] = Number<T>::narrow((typename Number<T>::Wide)Number<S>::widen(from.at[lane]));
        }
        ((Lanes<T, LANES> *)target)[i] = to;
    }
}

// target[i] = source[i], rounded to nearest even.
template <typename S, typename T> __device__ void cast(const S *source, T *target, u64 count) {
    const int LANES = Fill<S, T>::LANES;
    bool packed = aligned<S, LANES>(source) && aligned<T, LANES>(target);
    u64 whole = packed ? count - count % LANES : 0;
    cast_lanes<S, T, LANES>(source, target, 0, whole);
    cast_lanes<S, T, 1>(source, target, whole, count);
}

#define ONE(name, T)                                                                                                     \
    extern "C" __global__ void combine_##name(const __grid_constant__ Parts parts, u64 ranks, u64 count, int largest,    \
                                              T *out) {                                                                  \
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
    TWO(from, S, bf16, Bf16)                                                                                    \
    TWO(from, S, f16, F16)

FROM(f32, float)
FROM(f64, double)
FROM(bf16, Bf16)
FROM(f16, F16)
