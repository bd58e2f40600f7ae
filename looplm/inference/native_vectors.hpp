// Numbers of three dtypes, vectors of 64 bytes, threads: what the kernels of native.cpp are written in.
//
// Vectors are GCC's and clang's own extension, so that the same text serves every CPU.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};
template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
template <class T> inline T narrow(Wide<T> x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    return {uint16_t(x != x ? 0x7fc0 : even)};
}
template <class T> inline Wide<T> rounded(Wide<T> x) { return widen(narrow<T>(x)); }

// --- 64 bytes at a time ----------------------------------------------------------------------------------------------

typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
template <class T> using Vec = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;
template <class T> constexpr int64_t LANES = 64 / sizeof(Wide<T>);  // numbers in a Vec<T>
template <class T> constexpr int64_t STEP = 64 / sizeof(T);  // numbers that a step of a dot product takes

template <class V> inline V read64(const void *from) {
    V vec;
    memcpy(&vec, from, 64);
    return vec;
}
template <class T> inline Vec<T> load(const T *from) { return read64<Vec<T>>(from); }
inline Floats load(const bf16 *from) {
    Halves halves;
    memcpy(&halves, from, 32);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// acc += a * b over STEP<T> numbers, summed into the lanes in some order.
inline void step(Floats &acc, const float *a, const float *b) { acc += load(a) * load(b); }
inline void step(Doubles &acc, const double *a, const double *b) { acc += load(a) * load(b); }
inline void step(Floats &acc, const bf16 *a, const bf16 *b) {
#ifdef __AVX512BF16__
    acc = (Floats)_mm512_dpbf16_ps((__m512)acc, read64<__m512bh>(a), read64<__m512bh>(b));
#else
    Words x = read64<Words>(a), y = read64<Words>(b);
    acc += (Floats)(x << 16) * (Floats)(y << 16);
    acc += (Floats)(x & 0xffff0000u) * (Floats)(y & 0xffff0000u);
#endif
}
inline float total(Floats vec) {
    float part[16], sums[8];
    memcpy(part, &vec, 64);
    for (int i = 0; i < 8; i++) sums[i] = part[i] + part[i + 8];
    for (int i = 0; i < 4; i++) sums[i] += sums[i + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}
inline double total(Doubles vec) {
    double sums[4];
    for (int i = 0; i < 4; i++) sums[i] = vec[i] + vec[i + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// The totals of four vectors: halves are laid side by side and added until four partial sums of each are left.
inline void totals(const Floats *v, float *out) {
    Floats pairs[2];
    for (int i = 0; i < 2; i++)
        pairs[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    Floats four = __builtin_shufflevector(pairs[0], pairs[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(pairs[0], pairs[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    four += __builtin_shufflevector(four, four, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    for (int i = 0; i < 4; i++) out[i] = four[4 * i];
}
inline void totals(const Doubles *v, double *out) {
    for (int i = 0; i < 4; i++) out[i] = total(v[i]);
}

inline void exp_all(double *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = std::exp(x[i]);
}
// 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; within 2 units in the last place. Below -87 it stays at 1e-38.
inline Floats exp_of(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
    Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}
inline void exp_all(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
        float some[16] = {};
        int64_t left = count - i < 16 ? count - i : 16;
        memcpy(some, x + i, left * 4);
        Floats result = exp_of(load(some));
        memcpy(x + i, &result, left * 4);
    }
}

// --- Threads and scratch ---------------------------------------------------------------------------------------------

template <class Body> void parallel(int64_t threads, int64_t count, Body body) {
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp parallel num_threads(threads)
        {
            int64_t mine = omp_get_thread_num(), all = omp_get_num_threads();
            body(count * mine / all, count * (mine + 1) / all);
        }
        return;
    }
#endif
    body(int64_t(0), count);
}

// Numbers are not used twice, since T and Wide<T> may be one type. Kept for the next call: scratch number `which` of this thread, at least `count` long.
template <class T> T *scratch(int which, int64_t count) {
    static thread_local std::vector<T> kept[14];
    if (int64_t(kept[which].size()) < count) kept[which].resize(count);
    return kept[which].data();
}

}  // namespace
