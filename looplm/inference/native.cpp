// Decoding on a CPU: attention that reads keys and values where they lie, and a whole layer for a few rows.
//
// Compiled on the user's machine by native.py and called through ctypes: plain C functions over addresses, no header of
// torch. Results are rounded to the model's dtype wherever PyTorch rounds them; sums are kept in float (double for
// double).

#include <algorithm>

#include "native_vectors.hpp"

extern "C" {
// These structs are declared once more in native.py.
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
    const void *cos, *sin;  // (positions, head_dim)
    int64_t count, table_stride, loop_stride, threads;
};
struct Pass {
    const Layer *const *layers;
    void *const *keys, *const *values;  // of each layer
    const void *norm, *gate, *gate_bias, *embed_tokens;  // norm null: no scale
    void *states, *hidden, *embeds;  // (places, hidden_size); hidden may be states, embeds may be null
    void *gate_logits;  // (loops, places), in float for bfloat16
    int64_t num_layers, hidden_size, num_places;
    int64_t norms, exit_norms, raw_state, raw_hidden;  // 0 or 1
    double eps;
};
}

namespace {

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
        for (a = 0; a < Outs * Ins; a++)  // fused by name: left to the compiler, rows beside others get other bits
            sums[a] = std::fma(Wide<T>(widen(w[a / Ins * size + k])), Wide<T>(widen(x[a % Ins * size + k])), sums[a]);
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

// Places whose values are added up before they join the rest, whoever adds them: the same bits for any number of threads.
constexpr int64_t STRETCH = 256;

// What query heads `first` to `last` of one row read: keys and values at `count` places.
template <class T> struct Reading {
    const Layer &l;
    const int64_t *places;
    int64_t count, first, last;
    const T *queries, *keys, *values;
    Wide<T> *scores;  // of a head after the other

    int64_t num() const { return last - first; }
    int64_t stretches() const { return (count + STRETCH - 1) / STRETCH; }
    const T *at(const T *stored, int64_t j, int64_t h) const {
        return stored + (places[j] * l.kv_heads + (first + h) / (l.heads / l.kv_heads)) * l.head_dim;
    }
    // A place is read whole, in order of memory, before the next one.
    void score(int64_t stretch) const {
        Wide<T> scale = 1 / std::sqrt(Wide<T>(l.head_dim)), product;
        for (int64_t j = stretch * STRETCH; j < std::min(count, (stretch + 1) * STRETCH); j++)
            for (int64_t h = 0; h < num(); h++) {
                dots<T, 1, 1>(at(keys, j, h), queries + h * l.head_dim, l.head_dim, &product);
                scores[h * count + j] = product * scale;
            }
    }
    void softmax(int64_t h) const {
        Wide<T> *weights = scores + h * count, most = weights[0], sum = 0;
        for (int64_t j = 1; j < count; j++) most = weights[j] > most ? weights[j] : most;
        for (int64_t j = 0; j < count; j++) weights[j] -= most;
        exp_all(weights, count);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++) sum += weights[j];
        for (int64_t j = 0; j < count; j++) weights[j] /= sum;
    }
    void add_up(int64_t stretch, Wide<T> *sums) const {
        std::fill(sums, sums + num() * l.head_dim, Wide<T>(0));
        for (int64_t j = stretch * STRETCH; j < std::min(count, (stretch + 1) * STRETCH); j++)
            for (int64_t h = 0; h < num(); h++)
                add_weighted<T>(scores[h * count + j], at(values, j, h), l.head_dim, sums + h * l.head_dim);
    }
};

// All of it by one thread.
template <class T> void attend_row(Reading<T> reading, T *out) {
    int64_t size = reading.num() * reading.l.head_dim;
    reading.scores = scratch<Wide<T>>(8, reading.num() * reading.count);
    Wide<T> *sums = scratch<Wide<T>>(9, 2 * size), *some = sums + size;
    for (int64_t s = 0; s < reading.stretches(); s++) reading.score(s);
    for (int64_t h = 0; h < reading.num(); h++) reading.softmax(h);
    reading.add_up(0, sums);
    for (int64_t s = 1; s < reading.stretches(); s++) {
        reading.add_up(s, some);
        for (int64_t i = 0; i < size; i++) sums[i] += some[i];
    }
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(sums[i]);
}

// All of it by several threads, each of which reads places whole: parts of places, as many heads of each, are read more slowly by
// two threads than whole ones by one.
template <class T> void attend_long_row(Reading<T> reading, int64_t threads, T *out) {
    int64_t size = reading.num() * reading.l.head_dim, stretches = reading.stretches();
    reading.scores = scratch<Wide<T>>(8, reading.num() * reading.count);
    Wide<T> *sums = scratch<Wide<T>>(9, stretches * size);
    parallel(threads, stretches, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; s++) reading.score(s);
    });
    parallel(threads, reading.num(), [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) reading.softmax(h);
    });
    parallel(threads, stretches, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; s++) reading.add_up(s, sums + s * size);
    });
    for (int64_t s = 1; s < stretches; s++)
        for (int64_t i = 0; i < size; i++) sums[i] += sums[s * size + i];
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(sums[i]);
}

// Stores the keys and values of all rows, then lets every row read those of its slot and loop up to its position.
template <class T>
void attend(const Layer &l, const Rows &r, const T *q, const T *k, const T *v, T *keys, T *values, T *out) {
    int64_t d = l.head_dim, row = l.kv_heads * d;
    const T *cos = (const T *)r.cos, *sin = (const T *)r.sin;
    auto place = [&](const int64_t *at, int64_t position) {
        return r.table[at[0] * r.table_stride + position] + at[1] * r.loop_stride;
    };
    auto turn = [&](const T *from, const void *norm, int64_t position, T *to) {
        rotated<T>(l, from, norm, cos + position * d, sin + position * d, to);
    };
    parallel(r.threads, r.count, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            int64_t position = r.rows[4 * n + 3] - 1, own = place(r.rows + 4 * n, position) * row;
            for (int64_t h = 0; h < row; h += d) turn(k + n * row + h, l.k_norm, position, keys + own + h);
            memcpy(values + own, v + n * row, row * sizeof(T));
        }
    });
    auto reading = [&](int64_t n, int64_t first, int64_t last) {
        const int64_t *at = r.rows + 4 * n, count = at[3];
        int64_t *places = scratch<int64_t>(0, count);
        for (int64_t j = 0; j < count; j++) places[j] = place(at, j);
        T *queries = scratch<T>(11, l.heads * d);
        const T *from = q + n * l.heads * d;
        for (int64_t h = first; h < last; h++) turn(from + h * d, l.q_norm, count - 1, queries + (h - first) * d);
        return Reading<T>{l, places, count, first, last, queries, keys, values, nullptr};
    };
    int64_t longest = 0;
    for (int64_t n = 0; n < r.count; n++) longest = std::max(longest, r.rows[4 * n + 3]);
    if (r.threads > 1 && r.count % r.threads && r.count < 4 * r.threads && longest > 2 * STRETCH) {
        for (int64_t n = 0; n < r.count; n++)
            attend_long_row<T>(reading(n, 0, l.heads), r.threads, out + n * l.heads * d);
        return;
    }
    parallel(r.threads, r.count * l.heads, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            int64_t n = begin / l.heads, first = begin % l.heads, last = std::min(l.heads, first + end - begin);
            attend_row<T>(reading(n, first, last), out + (n * l.heads + first) * d);
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

// --- A pass ----------------------------------------------------------------------------------------------------------

// The core over single positions, with the final norm and the gate after it. `tokens` are those of rows that are new,
// -1 elsewhere: they start from their embedding, the others from their state.
template <class T> void core(const Pass &p, const Rows &r, const int64_t *tokens) {
    int64_t n = r.count, size = p.hidden_size;
    T *x = scratch<T>(12, n * size), *out = scratch<T>(13, n * size);
    auto place = [&](int64_t i) { return r.table[r.rows[4 * i] * r.table_stride + r.rows[4 * i + 3] - 1]; };
    for (int64_t i = 0; i < n; i++) {
        const T *from = (T *)p.states + place(i) * size;
        if (tokens[i] >= 0) from = (const T *)p.embed_tokens + tokens[i] * size;
        if (tokens[i] >= 0 && p.embeds) memcpy((T *)p.embeds + place(i) * size, from, size * sizeof(T));
        memcpy(x + i * size, from, size * sizeof(T));
    }
    for (int64_t l = 0; l < p.num_layers; l++, std::swap(x, out))
        layer<T>(*p.layers[l], r, x, (T *)p.keys[l], (T *)p.values[l], out);
    for (int64_t i = 0; i < n; i++) {
        T *raw = x + i * size, *normed = out + i * size;
        if (p.exit_norms) norm_row<T>(raw, nullptr, p.eps, size, raw);
        if (p.norms) norm_row<T>(raw, (const T *)p.norm, p.eps, size, normed);
        else memcpy(normed, raw, size * sizeof(T));
        memcpy((T *)p.hidden + place(i) * size, p.raw_hidden ? raw : normed, size * sizeof(T));
        memcpy((T *)p.states + place(i) * size, p.raw_state ? raw : normed, size * sizeof(T));
        Wide<T> logit;
        dots<T, 1, 1>((const T *)p.gate, normed, size, &logit);
        if (p.gate_bias) logit += widen(*(const T *)p.gate_bias);
        ((Wide<T> *)p.gate_logits)[r.rows[4 * i + 1] * p.num_places + place(i)] = rounded<T>(logit);
    }
}

// The first of the largest numbers of a row, or -1 where one of them is not finite.
template <class T> int64_t best(const T *x, int64_t count) {
    Wide<T> nothing = 0, most = widen(x[0]);
#pragma omp simd reduction(+ : nothing) reduction(max : most)
    for (int64_t i = 0; i < count; i++) {
        Wide<T> number = widen(x[i]);
        nothing += number * 0;
        most = number > most ? number : most;
    }
    if (nothing != 0) return -1;
    return std::find_if(x, x + count, [=](T number) { return widen(number) == most; }) - x;
}

}  // namespace

#define FOR(T, NAME)                                                                                                   \
    void layer_##NAME(const Layer *l, const Rows *r, const void *x, void *keys, void *values, void *out) {             \
        layer<T>(*l, *r, (const T *)x, (T *)keys, (T *)values, (T *)out);                                              \
    }                                                                                                                  \
    void core_##NAME(const Pass *p, const Rows *r, const int64_t *tokens) { core<T>(*p, *r, tokens); }                 \
    void attend_##NAME(const Layer *l, const Rows *r, const void *q, const void *k, const void *v, void *keys,         \
                       void *values, void *out) {                                                                      \
        attend<T>(*l, *r, (const T *)q, (const T *)k, (const T *)v, (T *)keys, (T *)values, (T *)out);                 \
    }                                                                                                                  \
    void linear_##NAME(const void *weight, const void *bias, const void *x, int64_t count, int64_t size, int64_t columns,  \
                       int64_t threads, void *out) {                                                                   \
        Product<T> product{(const T *)weight, (const T *)bias, (T *)out, columns};                                     \
        multiply(&product, 1, (const T *)x, count, size, threads);                                                     \
    }                                                                                                                  \
    void best_##NAME(const void *x, int64_t count, int64_t columns, int64_t *out) {                                    \
        for (int64_t n = 0; n < count; n++) out[n] = best<T>((const T *)x + n * columns, columns);                     \
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
