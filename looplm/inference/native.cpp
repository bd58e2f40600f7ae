// Decoding on a CPU: attention that reads keys and values where they lie, and a whole layer for a few rows.
//
// Compiled on the user's machine by native.py and called through ctypes: plain C functions over addresses, no header of
// torch. Results are rounded to the model's dtype wherever PyTorch rounds them; sums are kept in float (double for
// double). Vectors are GCC's and clang's own extension, so that the same text serves every CPU.

#include <algorithm>
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

extern "C" {
// Both structs are declared once more in native.py.
struct Layer {
    const void *norms[4];                // before and after attention, before and after the MLP; null: no scale
    const void *weights[7], *biases[7];  // q k v o gate up down; weights as nn.Linear has them, biases may be null
    const void *q_norm, *k_norm;
    int64_t hidden, wide, heads, kv_heads, head_dim;
    int64_t norms_before, norms_after, norms_the_sum, norms_qk;  // 0 or 1
    double eps, qk_eps;
};
struct Rows {
    const int64_t *rows;  // (count, 4): slot, loop, and the position from start to stop
    const int64_t *table;  // (slots, table_stride): where each position of a slot lies
    const void *cos, *sin;  // (count, head_dim)
    int64_t count, table_stride, loop_stride, threads;
};
}

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
    static thread_local std::vector<T> kept[12];
    if (int64_t(kept[which].size()) < count) kept[which].resize(count);
    return kept[which].data();
}

// --- Parts of a layer ------------------------------------------------------------------------------------------------

template <class T> void norm_row(const T *x, const T *scale, double eps, int64_t size, T *out) {
    Wide<T> squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += widen(x[i]) * widen(x[i]);
    Wide<T> factor = 1 / std::sqrt(squares / size + Wide<T>(eps));
    if (scale)
        for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(rounded<T>(widen(x[i]) * factor) * widen(scale[i]));
    else
        for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(widen(x[i]) * factor);
}

// Of a stripe of weights, how many stripes ahead memory is asked for: without it, products and memory wait for each other.
constexpr int64_t AHEAD = 2;

// Products of `Outs` rows of a matrix with `Ins` rows of the input: sums[o * Ins + i].
template <class T, int Outs, int Ins> inline void dots(const T *w, const T *x, int64_t size, Wide<T> *sums) {
    Vec<T> acc[Outs * Ins] = {};
    int64_t k = 0;
    for (; k + STEP<T> <= size; k += STEP<T>)
#pragma GCC unroll 4
        for (int o = 0; o < Outs; o++) {
            __builtin_prefetch(w + (o + AHEAD * Outs) * size + k);
#pragma GCC unroll 4
            for (int i = 0; i < Ins; i++) step(acc[o * Ins + i], w + o * size + k, x + i * size + k);
        }
    int a = 0;
    for (; a + 4 <= Outs * Ins; a += 4) totals(acc + a, sums + a);
    for (; a < Outs * Ins; a++) sums[a] = total(acc[a]);
    for (; k < size; k++)
        for (a = 0; a < Outs * Ins; a++) sums[a] += widen(w[a / Ins * size + k]) * widen(x[a % Ins * size + k]);
}

template <class T> struct Product {
    const T *weight, *bias;
    T *out;
    int64_t size;  // columns of out
};

template <class T, int Outs, int Ins>
void tile(const Product<T> &p, const T *x, int64_t size, int64_t first_out, int64_t first_in) {
    Wide<T> sums[Outs * Ins];
    dots<T, Outs, Ins>(p.weight + first_out * size, x + first_in * size, size, sums);
    for (int o = 0; o < Outs; o++)
        for (int i = 0; i < Ins; i++) {
            Wide<T> bias = p.bias ? widen(p.bias[first_out + o]) : 0;
            p.out[(first_in + i) * p.size + first_out + o] = narrow<T>(sums[o * Ins + i] + bias);
        }
}

template <class T, int Outs>
void stripe(const Product<T> &p, const T *x, int64_t count, int64_t size, int64_t first_out) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) tile<T, Outs, 4>(p, x, size, first_out, i);
    if (count - i == 3) tile<T, Outs, 3>(p, x, size, first_out, i);
    if (count - i == 2) tile<T, Outs, 2>(p, x, size, first_out, i);
    if (count - i == 1) tile<T, Outs, 1>(p, x, size, first_out, i);
}

// Linear layers that read the same input, (count, size): every weight is read once.
template <class T>
void multiply(const Product<T> *products, int num, const T *x, int64_t count, int64_t size, int64_t threads) {
    int64_t all = 0;
    for (int p = 0; p < num; p++) all += (products[p].size + 3) / 4;
    parallel(threads, all, [=](int64_t begin, int64_t end) {
        int64_t skipped = 0;
        for (int p = 0; p < num; p++) {
            int64_t stripes = (products[p].size + 3) / 4;
            for (int64_t s = std::max(begin - skipped, int64_t(0)); s < std::min(end - skipped, stripes); s++) {
                int64_t out = 4 * s, left = products[p].size - out;
                if (left >= 4) stripe<T, 4>(products[p], x, count, size, out);
                else
                    for (int64_t o = 0; o < left; o++) stripe<T, 1>(products[p], x, count, size, out + o);
            }
            skipped += stripes;
        }
    });
}

// --- Attention -------------------------------------------------------------------------------------------------------

// One head of queries or keys, normed where the model norms them, and turned by its position.
template <class T>
void rotated(const Layer &l, const T *from, const void *norm, const T *cos, const T *sin, T *out) {
    int64_t d = l.head_dim, half = d / 2;
    if (l.norms_qk) norm_row<T>(from, (const T *)norm, l.qk_eps, d, out);
    else memcpy(out, from, d * sizeof(T));
    for (int64_t i = 0; i < half; i++) {
        Wide<T> a = widen(out[i]), b = widen(out[i + half]);
        out[i] = narrow<T>(rounded<T>(a * widen(cos[i])) - rounded<T>(b * widen(sin[i])));
        out[i + half] = narrow<T>(rounded<T>(b * widen(cos[i + half])) + rounded<T>(a * widen(sin[i + half])));
    }
}

// out += weight * values, over a head.
template <class T> inline void add_weighted(Wide<T> weight, const T *values, int64_t d, Wide<T> *out) {
    int64_t i = 0;
    for (; i + LANES<T> <= d; i += LANES<T>) {
        Vec<T> sum = load(out + i) + weight * load(values + i);
        memcpy(out + i, &sum, 64);
    }
    for (; i < d; i++) out[i] += weight * widen(values[i]);
}

// Query heads `first` to `last` of one row, over the keys and values at `count` places. A place is read whole, in order
// of memory, before the next one.
template <class T>
void attend_row(const Layer &l, const int64_t *places, int64_t count, int64_t first, int64_t last, const T *queries,
                const T *keys, const T *values, T *out) {
    int64_t d = l.head_dim, row = l.kv_heads * d, group = l.heads / l.kv_heads, num = last - first;
    Wide<T> *scores = scratch<Wide<T>>(8, num * count), *sums = scratch<Wide<T>>(9, num * d);
    Wide<T> scale = 1 / std::sqrt(Wide<T>(d)), product;
    for (int64_t j = 0; j < count; j++)
        for (int64_t h = 0; h < num; h++) {
            dots<T, 1, 1>(keys + places[j] * row + (first + h) / group * d, queries + h * d, d, &product);
            scores[h * count + j] = product * scale;
        }
    for (int64_t h = 0; h < num; h++) {
        Wide<T> *weights = scores + h * count, most = weights[0], sum = 0;
        for (int64_t j = 1; j < count; j++) most = weights[j] > most ? weights[j] : most;
        for (int64_t j = 0; j < count; j++) weights[j] -= most;
        exp_all(weights, count);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++) sum += weights[j];
        for (int64_t j = 0; j < count; j++) weights[j] /= sum;
    }
    std::fill(sums, sums + num * d, Wide<T>(0));
    for (int64_t j = 0; j < count; j++)
        for (int64_t h = 0; h < num; h++)
            add_weighted<T>(scores[h * count + j], values + places[j] * row + (first + h) / group * d, d, sums + h * d);
    for (int64_t i = 0; i < num * d; i++) out[i] = narrow<T>(sums[i]);
}

// Stores the keys and values of all rows, then lets every row read those of its slot and loop up to its position.
template <class T>
void attend(const Layer &l, const Rows &r, const T *q, const T *k, const T *v, T *keys, T *values, T *out) {
    int64_t d = l.head_dim, row = l.kv_heads * d;
    const T *cos = (const T *)r.cos, *sin = (const T *)r.sin;
    auto place = [&](const int64_t *at, int64_t position) {
        return r.table[at[0] * r.table_stride + position] + at[1] * r.loop_stride;
    };
    parallel(r.threads, r.count, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            int64_t own = place(r.rows + 4 * n, r.rows[4 * n + 3] - 1) * row;
            for (int64_t h = 0; h < row; h += d)
                rotated<T>(l, k + n * row + h, l.k_norm, cos + n * d, sin + n * d, keys + own + h);
            memcpy(values + own, v + n * row, row * sizeof(T));
        }
    });
    parallel(r.threads, r.count * l.heads, [&](int64_t begin, int64_t end) {
        T *queries = scratch<T>(11, l.heads * d);
        while (begin < end) {
            int64_t n = begin / l.heads, first = begin % l.heads, last = std::min(l.heads, first + end - begin);
            const int64_t *at = r.rows + 4 * n, count = at[3];
            int64_t *places = scratch<int64_t>(0, count);
            for (int64_t j = 0; j < count; j++) places[j] = place(at, j);
            const T *from = q + n * l.heads * d;
            for (int64_t h = first; h < last; h++)
                rotated<T>(l, from + h * d, l.q_norm, cos + n * d, sin + n * d, queries + (h - first) * d);
            attend_row<T>(l, places, count, first, last, queries, keys, values, out + (n * l.heads + first) * d);
            begin += last - first;
        }
    });
}

// --- A layer ---------------------------------------------------------------------------------------------------------

// The residual sum of one row with the norm after it, and what the next branch reads where there is one.
template <class T> void join(const Layer &l, const T *x, T *branch, int after, T *out, T *next) {
    int64_t size = l.hidden;
    const T *scale = (const T *)l.norms[after];
    if (l.norms_after && !l.norms_the_sum) norm_row<T>(branch, scale, l.eps, size, branch);
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(widen(x[i]) + widen(branch[i]));
    if (l.norms_the_sum) norm_row<T>(out, scale, l.eps, size, out);
    if (!next) return;
    if (l.norms_before) norm_row<T>(out, (const T *)l.norms[2], l.eps, size, next);
    else memcpy(next, out, size * sizeof(T));
}

// silu(gate) * up, into gate.
template <class T> void swiglu(T *gate, const T *up, int64_t count, Wide<T> *exps) {
    for (int64_t i = 0; i < count; i++) exps[i] = -widen(gate[i]);
    exp_all(exps, count);
    for (int64_t i = 0; i < count; i++)
        gate[i] = narrow<T>(rounded<T>(widen(gate[i]) / (1 + exps[i])) * widen(up[i]));
}

template <class T> void layer(const Layer &l, const Rows &r, const T *x, T *keys, T *values, T *out) {
    int64_t n = r.count, size = l.hidden, q_size = l.heads * l.head_dim, k_size = l.kv_heads * l.head_dim;
    auto product = [&](int which, T *to, int64_t columns) {
        return Product<T>{(const T *)l.weights[which], (const T *)l.biases[which], to, columns};
    };
    T *in = scratch<T>(0, n * size), *branch = scratch<T>(1, n * size), *middle = scratch<T>(2, n * size);
    T *q = scratch<T>(3, n * q_size), *k = scratch<T>(4, n * k_size), *v = scratch<T>(5, n * k_size);
    for (int64_t i = 0; i < n * size; i += size)
        if (l.norms_before) norm_row<T>(x + i, (const T *)l.norms[0], l.eps, size, in + i);
        else memcpy(in + i, x + i, size * sizeof(T));
    Product<T> qkv[] = {product(0, q, q_size), product(1, k, k_size), product(2, v, k_size)};
    multiply(qkv, 3, in, n, size, r.threads);
    T *heads = scratch<T>(6, n * q_size);
    attend<T>(l, r, q, k, v, keys, values, heads);
    Product<T> o = product(3, branch, size);
    multiply(&o, 1, heads, n, q_size, r.threads);
    for (int64_t i = 0; i < n * size; i += size) join<T>(l, x + i, branch + i, 1, middle + i, in + i);
    T *gate = scratch<T>(6, n * l.wide), *up = scratch<T>(7, n * l.wide);
    Product<T> wider[] = {product(4, gate, l.wide), product(5, up, l.wide)};
    multiply(wider, 2, in, n, size, r.threads);
    swiglu<T>(gate, up, n * l.wide, scratch<Wide<T>>(10, n * l.wide));
    Product<T> down = product(6, branch, size);
    multiply(&down, 1, gate, n, l.wide, r.threads);
    for (int64_t i = 0; i < n * size; i += size) join<T>(l, middle + i, branch + i, 3, out + i, nullptr);
}

}  // namespace

#define FOR(T, NAME)                                                                                                   \
    void layer_##NAME(const Layer *l, const Rows *r, const void *x, void *keys, void *values, void *out) {             \
        layer<T>(*l, *r, (const T *)x, (T *)keys, (T *)values, (T *)out);                                              \
    }                                                                                                                  \
    void attend_##NAME(const Layer *l, const Rows *r, const void *q, const void *k, const void *v, void *keys,         \
                       void *values, void *out) {                                                                      \
        attend<T>(*l, *r, (const T *)q, (const T *)k, (const T *)v, (T *)keys, (T *)values, (T *)out);                 \
    }                                                                                                                  \
    void norm_##NAME(const void *x, const void *scale, double eps, int64_t count, int64_t size, void *out) {           \
        for (int64_t n = 0; n < count * size; n += size)                                                               \
            norm_row<T>((const T *)x + n, (const T *)scale, eps, size, (T *)out + n);                                  \
    }

extern "C" {
FOR(bf16, bfloat16)
FOR(float, float32)
FOR(double, float64)
}
