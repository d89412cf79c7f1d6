// Rows by number (embedding), and the softmax over a sharded vocabulary (cross entropy): the formulas are those of
// src/device/cpu/tokens.rs.
//
// A block has a row. Sums over a row are formed in double precision, in an order that depends on nothing but the row's length.

// A number that may be absent.
struct Maybe {
    i64 value;
    i64 present;
};

__device__ bool is(Maybe maybe, i64 value) {
    return maybe.present && maybe.value == value;
}

// The row that an id means, of `rows` that begin with number `first`; `rows` if none. Ids may be any number: no overflow.
__device__ u64 row_of(i64 id, i64 first, u64 rows) {
    u64 row = (u64)id - (u64)first;
    return id >= first && row < rows ? row : rows;
}

// Combines the values of a block's threads, in a fixed tree; all get the result.
template <typename W> __device__ W block_sum(W value, W *shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            shared[threadIdx.x] += shared[threadIdx.x + half];
        }
        __syncthreads();
    }
    value = shared[0];
    __syncthreads();
    return value;
}

// The position of the first of `ids` outside [low, high) that is not `except`, into `found`, which begins as the largest number.
extern "C" __global__ void find_outside_i64(const i64 *ids, u64 count, i64 low, i64 high, Maybe except, u64 *found) {
    for (u64 i = FIRST; i < count; i += STRIDE) {
        if ((ids[i] < low || ids[i] >= high) && !is(except, ids[i])) {
            atomicMin(found, i);
        }
    }
}

template <typename T, int LANES>
__device__ void copy_row(const T *source, T *target, u64 width) {
    typedef Lanes<T, LANES> Some;
    for (u64 c = threadIdx.x; c < width / LANES; c += blockDim.x) {
        Some zero = {};
        ((Some *)target)[c] = source ? ((const Some *)source)[c] : zero;
    }
}

// out[i] = table[ids[i] − first], or zeros where the table has no such row.
template <typename T>
__device__ void gather_rows(const T *table, u64 rows, u64 width, const i64 *ids, u64 count, i64 first, T *out) {
    const int LANES = Fill<T, T>::LANES;
    bool packed = width % LANES == 0 && aligned<T, LANES>(table) && aligned<T, LANES>(out);
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        u64 row = row_of(ids[i], first, rows);
        const T *source = row < rows ? table + row * width : 0;
        if (packed) {
            copy_row<T, LANES>(source, out + i * width, width);
        } else {
            copy_row<T, 1>(source, out + i * width, width);
        }
    }
}

// out[ids[i] − first] += rows[i], in the order of i. The block of an id's first occurrence adds all of them: no atomics, the same
// bits every time.
template <typename T>
__device__ void scatter_add_rows(const T *rows, u64 width, const i64 *ids, u64 count, i64 first, Maybe skip,
                                 typename Number<T>::Wide *out, u64 held) {
    __shared__ unsigned same[BLOCK];
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        i64 id = ids[i];
        u64 row = row_of(id, first, held);
        if (row == held || is(skip, id)) {
            continue;
        }
        unsigned earlier = 0;
        for (u64 j = threadIdx.x; j < i; j += BLOCK) {
            earlier |= ids[j] == id;
        }
        if (__syncthreads_or(earlier)) {
            continue;
        }
        for (u64 begin = i; begin < count; begin += BLOCK) {
            u64 j = begin + threadIdx.x;
            same[threadIdx.x] = j < count && ids[j] == id;
            if (!__syncthreads_or(same[threadIdx.x])) {
                continue;
            }
            for (u64 c = threadIdx.x; c < width; c += BLOCK) {
                typename Number<T>::Wide sum = out[row * width + c];
                for (unsigned at = 0; at < BLOCK; ++at) {
                    if (same[at]) {
                        sum += Number<T>::widen(rows[(begin + at) * width + c]);
                    }
                }
                out[row * width + c] = sum;
            }
            __syncthreads();
        }
    }
}

// out[i] = the largest of the first `valid` of row i; −∞ if there is none; a NaN stays.
template <typename T>
__device__ void row_max(const T *logits, u64 height, u64 width, u64 valid, typename Number<T>::Wide *out) {
    typedef typename Number<T>::Wide Wide;
    __shared__ Wide shared[BLOCK];
    for (u64 i = blockIdx.x; i < height; i += gridDim.x) {
        Wide value = minus_infinity();
        for (u64 c = threadIdx.x; c < valid; c += BLOCK) {
            value = larger(value, (Wide)Number<T>::widen(logits[i * width + c]));
        }
        shared[threadIdx.x] = value;
        __syncthreads();
        for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) {
                shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + half]);
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            out[i] = shared[0];
        }
        __syncthreads();
    }
}

// One rank's part of a softmax.
template <typename T> struct Part {
    const T *logits;
    u64 height;
    u64 width;
    u64 valid;
    i64 first;
    const i64 *targets;
    const typename Number<T>::Wide *max;
};

// out[i] = Σ exp(l − m), the target's l − m if this part holds it, Σ (l − m)
template <typename T> __device__ void softmax_sums(Part<T> part, typename Number<T>::Wide *out) {
    typedef typename Number<T>::Wide Wide;
    __shared__ double shared[BLOCK];
    for (u64 i = blockIdx.x; i < part.height; i += gridDim.x) {
        const T *row = part.logits + i * part.width;
        Wide max = part.max[i];
        double exponentials = 0, shifted = 0;
        for (u64 c = threadIdx.x; c < part.valid; c += BLOCK) {
            Wide difference = (Wide)Number<T>::widen(row[c]) - max;
            exponentials += (double)exp(difference);
            shifted += (double)difference;
        }
        exponentials = block_sum(exponentials, shared);
        shifted = block_sum(shifted, shared);
        if (threadIdx.x == 0) {
            u64 target = row_of(part.targets[i], part.first, part.valid);
            out[3 * i] = (Wide)exponentials;
            out[3 * i + 1] = target < part.valid ? (Wide)Number<T>::widen(row[target]) - max : 0;
            out[3 * i + 2] = (Wide)shifted;
        }
    }
}

// The options of a loss.
struct Options {
    double classes;
    double label_smoothing;
    double z_loss;
    Maybe ignore;
};

// A class that cannot be (−∞) must not meet a weight of 0.
__device__ double weighted(double weight, double value) {
    return weight == 0 ? 0 : weight * value;
}

// out[i] = the loss of row i
template <typename W>
__device__ void cross_entropy_loss(Options options, const i64 *targets, const W *max, const W *sums, u64 count, W *out) {
    for (u64 i = FIRST; i < count; i += STRIDE) {
        double log_sum = log((double)sums[3 * i]), log_z = (double)max[i] + log_sum, smoothing = options.label_smoothing;
        double loss = log_sum - (1 - smoothing) * (double)sums[3 * i + 1] -
                      weighted(smoothing / options.classes, (double)sums[3 * i + 2]) +
                      weighted(options.z_loss, log_z * log_z);
        out[i] = is(options.ignore, targets[i]) ? (W)0 : (W)loss;
    }
}

// out[i][c] = the gradient of logits[i][c]: that of log Z is p, of (log Z)² it is 2 log Z · p.
template <typename T>
__device__ void cross_entropy_grad(Part<T> part, Options options, const typename Number<T>::Wide *sums,
                                   const typename Number<T>::Wide *grads, T *out) {
    typedef typename Number<T>::Wide Wide;
    double shared = options.label_smoothing / options.classes;
    for (u64 i = blockIdx.x; i < part.height; i += gridDim.x) {
        const T *row = part.logits + i * part.width;
        Wide max = part.max[i];
        double sum = (double)sums[3 * i], grad = (double)grads[i];
        double of_p = grad * (1 + 2 * options.z_loss * ((double)max + log(sum))) / sum;
        u64 target = row_of(part.targets[i], part.first, part.valid);
        bool ignored = is(options.ignore, part.targets[i]);
        for (u64 c = threadIdx.x; c < part.width; c += BLOCK) {
            double value = 0;
            if (c < part.valid && !ignored) {
                double wanted = shared + (c == target ? 1 - options.label_smoothing : 0);
                value = of_p * (double)exp((Wide)Number<T>::widen(row[c]) - max) - grad * wanted;
            }
            out[i * part.width + c] = Number<T>::narrow((Wide)value);
        }
    }
}

#define TOKENS(name, T)                                                                                                  \
    extern "C" __global__ void gather_rows_##name(const T *table, u64 rows, u64 width, const i64 *ids, u64 count,        \
                                                  i64 first, T *out) {                                                   \
        gather_rows<T>(table, rows, width, ids, count, first, out);                                                      \
    }                                                                                                                    \
    extern "C" __global__ void scatter_add_rows_##name(const T *rows, u64 width, const i64 *ids, u64 count, i64 first,   \
                                                       Maybe skip, Number<T>::Wide *out, u64 held) {                     \
        scatter_add_rows<T>(rows, width, ids, count, first, skip, out, held);                                            \
    }                                                                                                                    \
    extern "C" __global__ void row_max_##name(const T *logits, u64 height, u64 width, u64 valid, Number<T>::Wide *out) { \
        row_max<T>(logits, height, width, valid, out);                                                                   \
    }                                                                                                                    \
    extern "C" __global__ void softmax_sums_##name(Part<T> part, Number<T>::Wide *out) {                                 \
        softmax_sums<T>(part, out);                                                                                      \
    }                                                                                                                    \
    extern "C" __global__ void cross_entropy_grad_##name(Part<T> part, Options options, const Number<T>::Wide *sums,     \
                                                         const Number<T>::Wide *grads, T *out) {                         \
        cross_entropy_grad<T>(part, options, sums, grads, out);                                                          \
    }

#define LOSS(name, W)                                                                                                    \
    extern "C" __global__ void cross_entropy_loss_##name(Options options, const i64 *targets, const W *max,              \
                                                         const W *sums, u64 count, W *out) {                             \
        cross_entropy_loss<W>(options, targets, max, sums, count, out);                                                  \
    }

TOKENS(f32, float)
TOKENS(f64, double)
TOKENS(bf16, Bf16)
TOKENS(f16, F16)
LOSS(f32, float)
LOSS(f64, double)
