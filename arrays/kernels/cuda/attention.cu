// Attention of floats of two bytes, forward and backward, without the matrix of the weights: Dao (2023), "FlashAttention-2".
//
// A block keeps 128 rows of queries (or of keys, for their cotangents), sixteen a warp, and goes through the keys (queries)
// in tiles; the next tile is on its way while one is multiplied. Weights are rounded to two bytes before they are multiplied.
// Each cotangent is summed by one block in one order: the same bits every time, at the price of computing weights twice. The
// forward pass leaves the largest score and the sum of each row for that (one log-sum-exp has no digits for the sum of a row of far
// scores); the mean of a row's slopes is the product of its result and its cotangent.
//
// A weight of zero times what is not finite is NaN, for keys that a tile leaves out, too: `attention_poison` finds it.
#include "headers/matrices.cuh"
#include "headers/reduce.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * WARPS;
constexpr float LOG2E = 1.44269504088896340736f;

__device__ inline float nan_or_zero(float x) { return x * 0.0f; }
__device__ inline float base_of(float most) { return most == infinity<float>() || most == -infinity<float>() ? 0.0f : most; }

// Sizes, and what a query may see.
struct Sight {
    int rows, keys, diagonal;  // query i sees no key after i + diagonal
    float scale;
    int kind;  // of the mask: none, of truths, or of numbers that are added
    const void* mask;
    int row, column;  // its steps

    __device__ bool is_masked() const { return kind || diagonal < keys; }
    __device__ int end(int queries) const { return max(0, min(keys, min(queries, rows) + diagonal)); }
    __device__ bool hides(int first_query, int keys_end) const { return kind || keys_end > keys || keys_end > first_query + diagonal + 1; }

    __device__ float operator()(float s, int i, int j) const
    {
        if (j >= keys || j > i + diagonal) return -infinity<float>();
        if (kind == 0 || i >= rows) return s;
        const i64 at = (i64)i * row + j * column;
        if (kind == 1) return static_cast<const bool*>(mask)[at] ? s : -infinity<float>();
        const float m = static_cast<const float*>(mask)[at];
        return m == -infinity<float>() ? m : s + m;
    }
};

// The operand that serves `step` neighbouring batches of the queries, and begins again after `count` of its own.
struct Repeated {
    i64 step, count;
    __device__ i64 of(i64 batch) const { return batch / step % count; }
};

#define SIGHT_PARAMETERS                                                                                                   \
    int rows, int keys, int d, int e, float scale, int diagonal, i64 kv_step, i64 kv_count, const void *mask, int mask_kind, \
        i64 mask_step, i64 mask_count, i64 mask_size, int mask_row, int mask_column

#define SIGHT(batch)                                                                                                          \
    {                                                                                                                          \
        rows, keys, diagonal, scale, mask_kind,                                                                                \
            static_cast<const char*>(mask) + Repeated{mask_step, mask_count}.of(batch) * mask_size * (mask_kind == 1 ? 1 : 4), \
            mask_row, mask_column                                                                                              \
    }

// Scores of 16 queries and N keys, from products: `query` and `key` are those of the first row and column of the lane.
template <int N>
__device__ inline void to_scores(float (&s)[N / 8][4], const Sight& sight, int query, int key, bool hidden)
{
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            s[n][c] *= sight.scale;
            if (hidden) s[n][c] = sight(s[n][c], query + c / 2 * 8, key + n * 8 + c % 2);
        }
}

// Over the four lanes that have a row of a fragment together.
template <class Op>
__device__ inline float of_row(float x)
{
    x = Op::of(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return Op::of(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

// The largest score and the sum of the weights so far, of both rows of a lane (the sum: of its own columns).
struct Online {
    float most[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {0, 0};

    // Scores become weights; `factors` is what all that was summed with the weights before is multiplied by.
    template <int N>
    __device__ void add(float (&s)[N][4], float (&factors)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = most[r];
#pragma unroll
            for (int n = 0; n < N; ++n) m = Max::of(m, Max::of(s[n][2 * r], s[n][2 * r + 1]));
            m = of_row<Max>(m);
            const float base = base_of(m);
            // Nothing stays nothing: the factor may be infinite.
            factors[r] = most[r] == -infinity<float>() ? 1.0f : exp2f((base_of(most[r]) - base) * LOG2E);
            most[r] = m;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int c = 2 * r; c < 2 * r + 2; ++c) sum += s[n][c] = exp2f((s[n][c] - base) * LOG2E);  // less the base first: both may be the least float
            total[r] = total[r] * factors[r] + sum;
        }
    }
    // The sum of the weights of a whole row; of one that sees nothing, what leaves zeros as they are.
    __device__ float whole(int r, bool masked) const
    {
        const float t = of_row<Add>(total[r]);
        return masked && t == 0 ? 1.0f : t;
    }
};

// The sixteen rows of a fragment, times a number for each row, plus a row, to memory; through `tile`, which the warp has for itself.
template <class T, int D>
__device__ inline void store_rows(T* matrix, T* tile, const float (&x)[D / 8][4], int first, int count, int width, const float (&factor)[2], const float* more)
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int column = n * 8 + lane % 4 * 2;
            float a = x[n][2 * r] * factor[r], b = x[n][2 * r + 1] * factor[r];
            if (more && column < width) a += more[column], b += more[column + 1];
            *reinterpret_cast<u32*>(tile + (lane / 4 + r * 8) * STRIDE<D> + column) = pack<T>(a, b);
        }
    __syncwarp();
    for (int i = lane; i < 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), column = i % (D / 8) * 8;
        if (first + row < count && column < width)
            store_vector(matrix + (i64)(first + row) * width + column, vector_at<8>(tile + row * STRIDE<D> + column));
    }
}

template <class T, int D>
__global__ void __launch_bounds__(THREADS, D <= 64 ? 2 : 1)
    attention_forward(const T* q, const T* k, const T* v, T* out, float* bases, float* totals, const float* poison, SIGHT_PARAMETERS)
{
    constexpr int N = 64, PAIR = 2 * N * STRIDE<D>;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (rows + ROWS - 1) / ROWS;
    const i64 batch = blockIdx.x / tiles, kv = Repeated{kv_step, kv_count}.of(batch);
    const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * ROWS;  // those that see most of the keys begin first
    const Sight sight SIGHT(batch);
    const int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 * 16, query = first + of_warp + lane / 4;
    T *const queries = shared, *const pairs = queries + ROWS * STRIDE<D>;
    const int end = sight.end(first + ROWS);
    const auto load = [&](int at) {
        T* const pair = pairs + at / N % 2 * PAIR;
        load_rows<D, N>(pair, k + kv * keys * d, at, keys, d);
        load_rows<D, N>(pair + N * STRIDE<D>, v + kv * keys * e, at, keys, e);
    };
    load_rows<D, ROWS>(queries, q + batch * rows * d, first, rows, d);
    if (end) load(0);
    Online online;
    float sum[D / 8][4] = {};
    for (int at = 0; at < end; at += N) {
        wait_for_copies();
        __syncthreads();  // this tile is there, and nobody reads the one before
        if (at + N < end) load(at + N);
        const T* const pair = pairs + at / N % 2 * PAIR;
        float s[N / 8][4] = {}, factors[2];
        add_product_transposed<D, N>(s, queries + of_warp * STRIDE<D>, pair);
        to_scores<N>(s, sight, query, at + lane % 4 * 2, sight.hides(first + of_warp, at + N));
        online.add(s, factors);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[n][c] *= factors[c / 2];
        add_product<D, N>(sum, s, pair + N * STRIDE<D>);
    }
    wait_for_copies();
    __syncthreads();  // the memory of the queries is free
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = online.whole(r, sight.is_masked());
        factors[r] = 1 / total;
        if (lane % 4 == 0 && query + r * 8 < rows) {
            bases[batch * rows + query + r * 8] = base_of(online.most[r]);
            totals[batch * rows + query + r * 8] = total;
        }
    }
    store_rows<T, D>(out + batch * rows * e, queries + of_warp * STRIDE<D>, sum, first + of_warp, rows, e, factors, poison ? poison + kv * e : nullptr);
}

// The cotangent of the queries; and of each row the mean of its slopes.
template <class T, int D>
__global__ void __launch_bounds__(THREADS, D <= 64 ? 2 : 1)
    attention_backward_queries(const T* q, const T* k, const T* v, const T* g, const T* out, T* dq, const float* bases,
                               const float* totals, float* means, const float* k_poison, SIGHT_PARAMETERS)
{
    constexpr int N = 32, PAIR = 2 * N * STRIDE<D>;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (rows + ROWS - 1) / ROWS;
    const i64 batch = blockIdx.x / tiles, kv = Repeated{kv_step, kv_count}.of(batch);
    const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * ROWS;
    const Sight sight SIGHT(batch);
    const int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 * 16, query = first + of_warp + lane / 4;
    T *const queries = shared, *const cotangents = queries + ROWS * STRIDE<D>, *const pairs = cotangents + ROWS * STRIDE<D>;
    const int end = sight.end(first + ROWS);
    const auto load = [&](int at) {
        T* const pair = pairs + at / N % 2 * PAIR;
        load_rows<D, N>(pair, k + kv * keys * d, at, keys, d);
        load_rows<D, N>(pair + N * STRIDE<D>, v + kv * keys * e, at, keys, e);
    };
    load_rows<D, ROWS>(queries, q + batch * rows * d, first, rows, d);
    load_rows<D, ROWS>(cotangents, g + batch * rows * e, first, rows, e);
    if (end) load(0);
    float sum[D / 8][4] = {}, base[2], log_total[2], mean[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 row = batch * rows + query + r * 8;
        const bool there = query + r * 8 < rows;
        base[r] = there ? bases[row] : 0;
        log_total[r] = there ? log2f(totals[row]) : infinity<float>();  // a query that is not there has no weights
        float s = 0;
        for (int c = lane % 4 * 8; there && c < e; c += 32) {
            const Vector<T, 8> x = vector_at<8>(out + row * e + c), y = vector_at<8>(g + row * e + c);
#pragma unroll
            for (int i = 0; i < 8; ++i) s += wide(x.at[i]) * wide(y.at[i]);
        }
        mean[r] = of_row<Add>(s);
        if (there && lane % 4 == 0) means[row] = mean[r];
    }
    for (int at = 0; at < end; at += N) {
        wait_for_copies();
        __syncthreads();
        if (at + N < end) load(at + N);
        const T* const pair = pairs + at / N % 2 * PAIR;
        float s[N / 8][4] = {}, slopes[N / 8][4] = {};
        add_product_transposed<D, N>(s, queries + of_warp * STRIDE<D>, pair);
        to_scores<N>(s, sight, query, at + lane % 4 * 2, sight.hides(first + of_warp, at + N));
        add_product_transposed<D, N>(slopes, cotangents + of_warp * STRIDE<D>, pair + N * STRIDE<D>);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[n][c] = exp2f((s[n][c] - base[c / 2]) * LOG2E - log_total[c / 2]) * (slopes[n][c] - mean[c / 2]);
        add_product<D, N>(sum, s, pair);
    }
    wait_for_copies();
    __syncthreads();  // the memory of the queries is free
    const float factors[2] = {scale, scale};
    store_rows<T, D>(dq + batch * rows * d, queries + of_warp * STRIDE<D>, sum, first + of_warp, rows, d, factors, k_poison ? k_poison + kv * d : nullptr);
}

// The cotangents of keys and values, summed over the queries of all batches that these serve.
template <class T, int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_keys(const T* q, const T* k, const T* v, const T* g, T* dk, T* dv, const float* bases,
                            const float* totals, const float* means, const float* q_poison, const float* g_poison, i64 batches, SIGHT_PARAMETERS)
{
    constexpr int N = 32, PAIR = 2 * N * STRIDE<D>;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (keys + ROWS - 1) / ROWS;
    const i64 kv = blockIdx.x / tiles;
    const int first = (int)(blockIdx.x % tiles) * ROWS;  // the first keys are seen by most of the queries
    const int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 * 16, key = first + of_warp + lane / 4;
    T *const own = shared, *const values = own + ROWS * STRIDE<D>, *const pairs = values + ROWS * STRIDE<D>;
    float *const levels = reinterpret_cast<float*>(pairs + 2 * PAIR), *const logs = levels + N, *const middles = logs + N;
    const int begin = min(rows, max(0, first - diagonal)), steps = (rows - begin + N - 1) / N;
    const i64 served = batches / kv_count, all = served * steps;
    const auto batch_of = [&](i64 i) { return (i / kv_step * kv_count + kv) * kv_step + i % kv_step; };
    const auto load = [&](i64 step) {
        T* const pair = pairs + step % 2 * PAIR;
        const i64 batch = batch_of(step / steps);
        const int at = begin + (int)(step % steps) * N;
        load_rows<D, N>(pair, q + batch * rows * d, at, rows, d);
        load_rows<D, N>(pair + N * STRIDE<D>, g + batch * rows * e, at, rows, e);
    };
    load_rows<D, ROWS>(own, k + kv * keys * d, first, keys, d);
    load_rows<D, ROWS>(values, v + kv * keys * e, first, keys, e);
    if (all) load(0);
    float sum[D / 8][4] = {}, value_sum[D / 8][4] = {};
    for (i64 step = 0; step < all; ++step) {
        const i64 batch = batch_of(step / steps);
        const int at = begin + (int)(step % steps) * N;
        const Sight sight SIGHT(batch);
        wait_for_copies();
        __syncthreads();
        if (step + 1 < all) load(step + 1);
        for (int i = threadIdx.x; i < N; i += THREADS) {  // a query that is not there has no weights
            const i64 row = batch * rows + at + i;
            const bool there = at + i < rows;
            levels[i] = there ? bases[row] : 0;
            logs[i] = there ? log2f(totals[row]) : infinity<float>();
            middles[i] = there ? means[row] : 0;
        }
        const T* const pair = pairs + step % 2 * PAIR;
        float p[N / 8][4] = {}, slopes[N / 8][4] = {};
        add_product_transposed<D, N>(p, own + of_warp * STRIDE<D>, pair);
        add_product_transposed<D, N>(slopes, values + of_warp * STRIDE<D>, pair + N * STRIDE<D>);
        __syncthreads();
        const bool hidden = sight.hides(at, first + of_warp + 16);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = n * 8 + lane % 4 * 2 + c % 2;
                float s = p[n][c] * scale;
                if (hidden) s = sight(s, at + i, key + c / 2 * 8);
                p[n][c] = exp2f((s - levels[i]) * LOG2E - logs[i]);
                slopes[n][c] = p[n][c] * (slopes[n][c] - middles[i]);
            }
        add_product<D, N>(value_sum, p, pair + N * STRIDE<D>);
        add_product<D, N>(sum, slopes, pair);
    }
    wait_for_copies();
    // Queries before `begin` have weights of zero here, which are NaN where all of their weights are; so with their slopes.
    float more = 0, value_more = 0;
    for (i64 i = threadIdx.x; i < served * begin; i += THREADS) {
        const i64 at = batch_of(i / begin) * rows + i % begin;
        if (totals[at] != totals[at]) value_more = totals[at];
        more += nan_or_zero(means[at]);
    }
    more = row_sum<THREADS>(more + value_more), value_more = row_sum<THREADS>(value_more);
    float* const poisons = reinterpret_cast<float*>(pairs);
    __syncthreads();
    for (int i = threadIdx.x; i < d + e; i += THREADS) {
        float x = i < d ? more : value_more;
        for (i64 b = 0; q_poison && b < served; ++b) x += i < d ? q_poison[batch_of(b) * d + i] : g_poison[batch_of(b) * e + i - d];
        poisons[i] = x;
    }
    __syncthreads();
    const float factors[2] = {scale, scale}, ones[2] = {1, 1};
    store_rows<T, D>(dk + kv * keys * d, own + of_warp * STRIDE<D>, sum, first + of_warp, keys, d, factors, poisons);
    store_rows<T, D>(dv + kv * keys * e, values + of_warp * STRIDE<D>, value_sum, first + of_warp, keys, e, ones, poisons + d);
}

// NaN for each column of a matrix with an element that is not finite; `out` is zeros before.
template <class T>
__global__ void __launch_bounds__(THREADS) attention_poison(const T* x, float* out, int rows, int width, int parts)
{
    const i64 batch = blockIdx.x / parts;
    const int vectors = width / 8, part = blockIdx.x % parts;
    x += batch * rows * width;
    for (i64 i = part * THREADS + threadIdx.x; i < (i64)rows * vectors; i += (i64)parts * THREADS) {
        const Vector<T, 8> v = vector_at<8>(x + i * 8);
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (nan_or_zero(wide(v.at[c])) != 0) atomicMax(reinterpret_cast<int*>(out) + batch * width + i % vectors * 8 + c, 0x7fc00000);
    }
}
