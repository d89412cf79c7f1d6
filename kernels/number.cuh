// What all kernels share: arithmetic in an accumulator's type, 16-byte accesses, a grid that serves any length.
//
// The sources of this directory are compiled as one, this first. They include nothing: NVRTC comes without CUDA's headers where only
// the runtime packages are installed.

typedef unsigned long long u64;
typedef long long i64;

// The 16-bit floats, as they lie in memory.
struct Bf16 {
    unsigned short bits;
};
struct F16 {
    unsigned short bits;
};

#ifdef __CUDACC__
__device__ float widened(Bf16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
__device__ float widened(F16 x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
}
__device__ Bf16 rounded_to_bf16(float value) {
    Bf16 x;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
    return x;
}
__device__ F16 rounded_to_f16(float value) {
    F16 x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
    return x;
}
__device__ float minus_infinity() {
    return __int_as_float(0xff800000);
}
#endif

// Widening to the accumulator (f32, or f64 for f64), and rounding from it.
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
template <> struct Number<Bf16> {
    typedef float Wide;
    static __device__ float widen(Bf16 x) { return widened(x); }
    static __device__ Bf16 narrow(float x) { return rounded_to_bf16(x); }
};
template <> struct Number<F16> {
    typedef float Wide;
    static __device__ float widen(F16 x) { return widened(x); }
    static __device__ F16 narrow(float x) { return rounded_to_f16(x); }
};

// A thread takes every so many-th piece of the whole.
#define FIRST (blockIdx.x * (u64)blockDim.x + threadIdx.x)
#define STRIDE (gridDim.x * (u64)blockDim.x)

// Neighbouring elements, read and written in one go.
template <typename T, int LANES> struct __align__(sizeof(T) * LANES) Lanes {
    T at[LANES];
};

// How many of the wider of two types fill 16 bytes.
template <typename S, typename T> struct Fill {
    static const int LANES = 16 / (sizeof(S) > sizeof(T) ? sizeof(S) : sizeof(T));
};

// Whether LANES elements can be accessed as one there.
template <typename T, int LANES> __device__ bool aligned(const T *at) {
    return (u64)at % (sizeof(T) * LANES) == 0;
}

// The larger; a NaN stays.
template <typename W> __device__ W larger(W a, W b) {
    return b > a || b != b ? b : a;
}

// Threads of every block.
#define BLOCK 256
