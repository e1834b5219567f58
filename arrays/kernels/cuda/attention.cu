// Attention of floats of two bytes, forward and backward, without the matrix of the weights: Dao (2023), "FlashAttention-2".
//
// A block keeps 128 rows of queries, 32 a warp, and goes through the keys in tiles; the next tile is on its way while one is multiplied.
// A fragment of keys or values that a warp loads serves two products so: memory shared by a block is as scarce as the tensor cores. For the
// cotangents of keys and values a block keeps keys, and two warps share 32 of them. Of heads of more than 128 elements all of these are half
// as many, for their sums take the registers. Weights are rounded to two bytes before they are
// multiplied. Each cotangent is summed by one block in one order: the same bits every time, at the price of computing weights twice. The
// forward pass leaves the largest score and the sum of each row for that (one log-sum-exp has no digits for the sum of a row of far
// scores); the mean of a row's slopes is the product of its result and its cotangent.
//
// A weight of zero times what is not finite is NaN, for keys that a tile leaves out, too: `attention_poison` finds it.
#include "headers/matrices.cuh"
#include "headers/reduce.cuh"

constexpr int THREADS = 128;  // of a block
constexpr float LOG2E = 1.44269504088896340736f;

__device__ inline float nan_or_zero(float x) { return x * 0.0f; }
__device__ inline float base_of(float most) { return most == infinity<float>() || most == -infinity<float>() ? 0.0f : most; }

// To the last digits but two; what is smaller than the least normal number is zero.
__device__ inline float power_of_two(float x)
{
#ifdef EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// NaN wins.
__device__ inline float larger(float x, float y)
{
#if defined(EMULATED) || __CUDA_ARCH__ < 800
    return Max::of(x, y);
#else
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#endif
}

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
    __device__ bool sees(int i, int j) const { return j < keys && j <= i + diagonal; }

    __device__ float with_mask(float s, int i, int j) const
    {
        asm volatile("" : "+r"(i));  // what is the same for a row is made again for each score: registers are rarer than instructions here
        if (!sees(i, j)) return -infinity<float>();
        if (i >= rows) return s;
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
            mask_kind ? static_cast<const char*>(mask) + Repeated{mask_step, mask_count}.of(batch) * mask_size * (mask_kind == 1 ? 1 : 4) : nullptr, \
            mask_row, mask_column                                                                                              \
    }

// ----- tiles of rows of D elements, and products of the rows of a warp: one or two HALVES of 16 -----------------------

template <int D>
constexpr int HALVES = D <= 128 ? 2 : 1;

// Where an element of a tile lies: 16 bytes have their places in a row changed, so that those of eight rows lie in different banks.
template <int D>
__device__ inline int place(int row, int column)
{
    return row * D + (column ^ (D < 64 ? row / 2 % 4 : row % 8) * 8);
}

// `N` rows of a matrix with `count` rows of `width` elements, from row `first` on, by THREADS threads; zeros where it has none.
// They are there after the next wait and the next barrier.
template <int D, int N, int THREADS, class T>
__device__ inline void load_rows(T* tile, const T* matrix, int first, int count, int width)
{
    constexpr int STEP = THREADS * 8 / D;  // mostly a multiple of eight: all of a thread's have the same place in their rows
    const int row = threadIdx.x / (D / 8), column = threadIdx.x % (D / 8) * 8, left = column < width ? count - first - row : 0;
    const T* from = matrix + (i64)(first + row) * width + column;
    T* const to = tile + place<D>(row, column);
#pragma unroll
    for (int i = 0; i < N; i += STEP, from += STEP * width)
        if (N % STEP == 0 || i + row < N) copy_later(STEP % 8 ? tile + place<D>(row + i, column) : to + i * D, i < left ? from : matrix, i < left);
}

template <int D, class T>
__device__ inline void left_of(u32 (&out)[4], const T* tile, int row, int k)
{
    const int lane = threadIdx.x % 32;
    load_matrices<false>(out, tile + row * D + place<D>(lane % 16, k + lane / 16 * 8));
}

// Two neighbours of 16 x 8 of a right factor, from `k` and `column` on: of a tile of its rows, or TRANSPOSED, of its columns.
template <bool TRANSPOSED, int D, class T>
__device__ inline void right_of(u32 (&out)[4], const T* tile, int k, int column)
{
    const int lane = threadIdx.x % 32;
    if constexpr (TRANSPOSED)
        load_matrices<false>(out, tile + column * D + place<D>(lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
    else
        load_matrices<true>(out, tile + k * D + place<D>(lane % 16, column + lane / 16 * 8));
}

// Sums of 16 H rows and of N columns. Each fragment of a right factor serves all halves of the rows.
template <int N, int H>
using Sums = float[H][N / 8][4];

// sum += a b^T, of the rows of `a` from `row` on and those of `b` from `column` on.
template <int D, int N, int H, class T>
__device__ inline void add_product_transposed(Sums<N, H>& sum, const T* a, int row, const T* b, int column)
{
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        u32 x[H][4];
#pragma unroll
        for (int h = 0; h < H; ++h) left_of<D>(x[h], a, row + 16 * h, k);
#pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
            u32 y[4];
            right_of<true, D>(y, b, k, column + n * 8);
#pragma unroll
            for (int h = 0; h < H; ++h) {
                multiply_add<T>(sum[h][n], x[h], y[0], y[1]);
                multiply_add<T>(sum[h][n + 1], x[h], y[2], y[3]);
            }
        }
    }
}

// sum += a b, for 16 columns of `a` and as many rows of `b` from `k` on.
template <int D, int WIDTH, int H, class T>
__device__ inline void add_part(Sums<WIDTH, H>& sum, const u32 (&x)[H][4], const T* b, int k, int column)
{
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n += 2) {
        u32 y[4];
        right_of<false, D>(y, b, k, column + n * 8);
#pragma unroll
        for (int h = 0; h < H; ++h) {
            multiply_add<T>(sum[h][n], x[h], y[0], y[1]);
            multiply_add<T>(sum[h][n + 1], x[h], y[2], y[3]);
        }
    }
}

// sum += p b, where `p` is sums that are rounded to T.
template <int D, int N, int H, class T>
__device__ inline void add_product(Sums<D, H>& sum, const Sums<N, H>& p, const T* b)
{
#pragma unroll
    for (int k = 0; k < N / 8; k += 2) {
        u32 x[H][4];
#pragma unroll
        for (int h = 0; h < H; ++h)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[h][i] = pack<T>(p[h][k + i / 2][i % 2 * 2], p[h][k + i / 2][i % 2 * 2 + 1]);
        add_part<D, D>(sum, x, b, k * 8, 0);
    }
}

// Scores from products: `row` and `column` are those of the lane's first. The rows are the queries, or TURNED, the keys.
template <bool TURNED, int N, int H>
__device__ inline void to_scores(Sums<N, H>& s, const Sight& sight, int row, int column, bool hidden)
{
    const auto change = [&](const auto& to) {
#pragma unroll
        for (int h = 0; h < H; ++h)
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int a = row + 16 * h + c / 2 * 8, b = column + n * 8 + c % 2;
                    s[h][n][c] = to(s[h][n][c], TURNED ? b : a, TURNED ? a : b);
                }
    };
    change([&](float x, int, int) { return product(x, sight.scale); });
    if (!hidden) return;
    if (sight.kind)
        change([&](float x, int i, int j) { return sight.with_mask(x, i, j); });
    else
        change([&](float x, int i, int j) { return sight.sees(i, j) ? x : -infinity<float>(); });
}

// Over the four lanes that have a row of a fragment together.
template <class Op>
__device__ inline float of_row(float x)
{
    x = Op::of(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return Op::of(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

// The rows of sums from row and column on, times a number, or a number for each row, plus a row of them, to memory; through `tile`,
// of which the warp has these rows and columns for itself.
template <int D, int WIDTH, int H, class T, class Factor>
__device__ inline void store_rows(T* matrix, T* tile, const Sums<WIDTH, H>& x, int in_tile, int first, int count, int begin, int width, const Factor& factor, const float* more)
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int column = begin + n * 8 + lane % 4 * 2;
                float a = x[h][n][2 * r] * factor(h, r), b = x[h][n][2 * r + 1] * factor(h, r);
                if (more && column < width) a += more[column], b += more[column + 1];
                *reinterpret_cast<u32*>(tile + (in_tile + h * 16) * D + place<D>(lane / 4 + r * 8, column)) = pack<T>(a, b);
            }
    __syncwarp();
    for (int i = lane; i < 16 * H * (WIDTH / 8); i += 32) {
        const int row = i / (WIDTH / 8), column = begin + i % (WIDTH / 8) * 8;
        if (first + row < count && column < width)
            store_vector(matrix + (i64)(first + row) * width + column, vector_at<8>(tile + in_tile * D + place<D>(row, column)));
    }
}

// ----- forward ----------------------------------------------------------------------------------------------------------

// The largest score and the sum of the weights so far, of the rows of a lane (the sum: of its own columns).
template <int H, int N>
struct Online {
    float most[H][2], total[H][2] = {};

    __device__ Online()
    {
#pragma unroll
        for (int i = 0; i < 2 * H; ++i) most[i / 2][i % 2] = -infinity<float>();
    }

    // The scores of a tile, and what all that was summed with the weights before is multiplied by.
    __device__ bool raise(const Sums<N, H>& s, float (&factors)[H][2])
    {
        bool changed = false;
#pragma unroll
        for (int h = 0; h < H; ++h)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float m = most[h][r];
#pragma unroll
                for (int n = 0; n < N / 8; ++n) m = larger(m, larger(s[h][n][2 * r], s[h][n][2 * r + 1]));
                m = larger(m, __shfl_xor_sync(WHOLE_WARP, m, 1));
                m = larger(m, __shfl_xor_sync(WHOLE_WARP, m, 2));
                // Nothing stays nothing: the factor may be infinite.
                factors[h][r] = most[h][r] == -infinity<float>() ? 1.0f : power_of_two((base_of(most[h][r]) - base_of(m)) * LOG2E);
                most[h][r] = m;
                total[h][r] *= factors[h][r];
                changed |= factors[h][r] != 1.0f;
            }
        return changed;
    }
    // Scores become weights.
    __device__ void add(Sums<N, H>& s)
    {
#pragma unroll
        for (int h = 0; h < H; ++h)
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)  // less the base first: both may be the least float
                    total[h][c / 2] += s[h][n][c] = power_of_two((s[h][n][c] - base_of(most[h][c / 2])) * LOG2E);
    }
    // The sum of the weights of a whole row; of one that sees nothing, what leaves zeros as they are.
    __device__ float whole(int h, int r, bool masked) const
    {
        const float t = of_row<Add>(total[h][r]);
        return masked && t == 0 ? 1.0f : t;
    }
};

template <class T, int D>
__global__ void __launch_bounds__(THREADS, 2)
    attention_forward(const T* q, const T* k, const T* v, T* out, float* bases, float* totals, const float* poison, SIGHT_PARAMETERS)
{
    constexpr int N = D <= 64 ? 64 : D <= 128 ? 48 : 32, PAIR = 2 * N * D;  // more would take more registers than there are
    constexpr int H = HALVES<D>, OF_WARP = 16 * H, ROWS = 4 * OF_WARP;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (rows + ROWS - 1) / ROWS;
    const i64 batch = blockIdx.x / tiles, kv = Repeated{kv_step, kv_count}.of(batch);
    const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * ROWS;  // those that see most of the keys begin first
    const Sight sight SIGHT(batch);
    const int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 * OF_WARP, query = first + of_warp + lane / 4;
    T *const queries = shared, *const pairs = queries + ROWS * D;
    const int end = sight.end(first + ROWS), own_end = sight.end(first + of_warp + OF_WARP);
    const auto load = [&](int at) {
        T* const pair = pairs + at / N % 2 * PAIR;
        load_rows<D, N, THREADS>(pair, k + kv * keys * d, at, keys, d);
        load_rows<D, N, THREADS>(pair + N * D, v + kv * keys * e, at, keys, e);
    };
    load_rows<D, ROWS, THREADS>(queries, q + batch * rows * d, first, rows, d);
    if (end) load(0);
    Online<H, N> online;
    Sums<D, H> sum = {};
    for (int at = 0; at < end; at += N) {
        wait_for_copies();
        __syncthreads();  // this tile is there, and nobody reads the one before
        if (at + N < end) load(at + N);
        if (at >= own_end) continue;
        const T* const pair = pairs + at / N % 2 * PAIR;
        Sums<N, H> s = {};
        float factors[H][2];
        add_product_transposed<D, N>(s, queries, of_warp, pair, 0);
        to_scores<false, N>(s, sight, query, at + lane % 4 * 2, sight.hides(first + of_warp, at + N));
        if (__ballot_sync(WHOLE_WARP, online.raise(s, factors)))
#pragma unroll
            for (int h = 0; h < H; ++h)
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) sum[h][n][c] *= factors[h][c / 2];
        online.add(s);
        add_product<D, N>(sum, s, pair + N * D);
    }
    wait_for_copies();
    __syncthreads();  // the memory of the queries is free
    float factors[H][2];
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = online.whole(h, r, sight.is_masked());
            const int i = query + h * 16 + r * 8;
            factors[h][r] = 1 / total;
            if (lane % 4 == 0 && i < rows) {
                bases[batch * rows + i] = base_of(online.most[h][r]);
                totals[batch * rows + i] = total;
            }
        }
    store_rows<D, D>(out + batch * rows * e, queries, sum, of_warp, first + of_warp, rows, 0, e, [&](int h, int r) { return factors[h][r]; }, poison ? poison + kv * e : nullptr);
}

// ----- backward ---------------------------------------------------------------------------------------------------------

// The cotangent of the queries; and of each row the mean of its slopes.
template <class T, int D>
__global__ void __launch_bounds__(THREADS, 2)
    attention_backward_queries(const T* q, const T* k, const T* v, const T* g, const T* out, T* dq, const float* bases,
                               const float* totals, float* means, const float* k_poison, SIGHT_PARAMETERS)
{
    constexpr int N = D <= 64 ? 48 : D <= 128 ? 32 : 16, PAIR = 2 * N * D, H = HALVES<D>, OF_WARP = 16 * H, ROWS = 4 * OF_WARP;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (rows + ROWS - 1) / ROWS;
    const i64 batch = blockIdx.x / tiles, kv = Repeated{kv_step, kv_count}.of(batch);
    const int first = (tiles - 1 - (int)(blockIdx.x % tiles)) * ROWS;
    const Sight sight SIGHT(batch);
    const int lane = threadIdx.x % 32, of_warp = threadIdx.x / 32 * OF_WARP, query = first + of_warp + lane / 4;
    T *const queries = shared, *const cotangents = queries + ROWS * D, *const pairs = cotangents + ROWS * D;
    const int end = sight.end(first + ROWS), own_end = sight.end(first + of_warp + OF_WARP);
    const auto load = [&](int at) {
        T* const pair = pairs + at / N % 2 * PAIR;
        load_rows<D, N, THREADS>(pair, k + kv * keys * d, at, keys, d);
        load_rows<D, N, THREADS>(pair + N * D, v + kv * keys * e, at, keys, e);
    };
    load_rows<D, ROWS, THREADS>(queries, q + batch * rows * d, first, rows, d);
    load_rows<D, ROWS, THREADS>(cotangents, g + batch * rows * e, first, rows, e);
    if (end) load(0);
    float base[H][2], log_total[H][2], mean[H][2];
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i64 row = batch * rows + query + h * 16 + r * 8;
            const bool there = query + h * 16 + r * 8 < rows;
            base[h][r] = there ? bases[row] : 0;
            log_total[h][r] = there ? log2f(totals[row]) : infinity<float>();  // a query that is not there has no weights
            float s = 0;
            for (int c = lane % 4 * 8; there && c < e; c += 32) {
                const Vector<T, 8> x = vector_at<8>(out + row * e + c), y = vector_at<8>(g + row * e + c);
#pragma unroll
                for (int i = 0; i < 8; ++i) s += wide(x.at[i]) * wide(y.at[i]);
            }
            mean[h][r] = of_row<Add>(s);
            if (there && lane % 4 == 0) means[row] = mean[h][r];
        }
    Sums<D, H> sum = {};
    for (int at = 0; at < end; at += N) {
        wait_for_copies();
        __syncthreads();
        if (at + N < end) load(at + N);
        if (at >= own_end) continue;
        const T* const pair = pairs + at / N % 2 * PAIR;
        Sums<N, H> s = {}, slopes = {};
        add_product_transposed<D, N>(s, queries, of_warp, pair, 0);
        to_scores<false, N>(s, sight, query, at + lane % 4 * 2, sight.hides(first + of_warp, at + N));
        add_product_transposed<D, N>(slopes, cotangents, of_warp, pair + N * D, 0);
#pragma unroll
        for (int h = 0; h < H; ++h)
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    s[h][n][c] = power_of_two((s[h][n][c] - base[h][c / 2]) * LOG2E - log_total[h][c / 2]) * (slopes[h][n][c] - mean[h][c / 2]);
        add_product<D, N>(sum, s, pair);
    }
    wait_for_copies();
    __syncthreads();  // the memory of the queries is free
    store_rows<D, D>(dq + batch * rows * d, queries, sum, of_warp, first + of_warp, rows, 0, d, [&](int, int) { return scale; }, k_poison ? k_poison + kv * d : nullptr);
}

// The two warps that have the same keys wait for each other.
__device__ inline void wait_for_partner(int pair)
{
#ifdef EMULATED
    __syncthreads();
#else
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
#endif
}

// The cotangents of keys and values, summed over the queries of all batches that these serve, N a step. Two warps have the same keys: each
// makes the weights and slopes of half of the queries, and with those of both sums half of the columns.
template <class T, int D, int N>
__global__ void __launch_bounds__(4 * N, 1)
    attention_backward_keys(const T* q, const T* k, const T* v, const T* g, T* dk, T* dv, const float* bases,
                            const float* totals, const float* means, const float* q_poison, const float* g_poison, i64 batches, SIGHT_PARAMETERS)
{
    constexpr int H = HALVES<D>, OF_PAIR = 16 * H, THREADS = 4 * N, KEYS = H * N, PAIR = 2 * N * D, HALF = N / 2, WIDTH = D / 2;
    DYNAMIC_SHARED(T, shared);
    const int tiles = (keys + KEYS - 1) / KEYS;
    const i64 kv = blockIdx.x / tiles;
    const int first = (int)(blockIdx.x % tiles) * KEYS;  // the first keys are seen by most of the queries
    const int lane = threadIdx.x % 32, of_pair = threadIdx.x / 64 * OF_PAIR, half = threadIdx.x / 32 % 2, key = first + of_pair + lane / 4;
    T *const own = shared, *const values = own + KEYS * D, *const pairs = values + KEYS * D, *const weights = pairs + 2 * PAIR, *const slopes = weights + KEYS * N;
    float* const of_queries = reinterpret_cast<float*>(slopes + KEYS * N);  // twice: base, logarithm of the sum and mean of each query of a step
    const int begin = min(rows, max(0, first - diagonal));
    const i64 served = batches / kv_count;
    const auto batch_of = [&](i64 i) { return (i / kv_step * kv_count + kv) * kv_step + i % kv_step; };
    i64 turn = 0, batch = batch_of(0);
    int at = begin;
    float base, log_total, mean;  // of a query of the step that is loaded
    const auto load = [&](int stage) {
        T* const pair = pairs + stage * PAIR;
        load_rows<D, N, THREADS>(pair, q + batch * rows * d, at, rows, d);
        load_rows<D, N, THREADS>(pair + N * D, g + batch * rows * e, at, rows, e);
        const bool there = (int)threadIdx.x < min(N, rows - at);
        const i64 row = batch * rows + at + threadIdx.x;
        base = there ? bases[row] : infinity<float>();  // which no query has that is there
        log_total = there ? totals[row] : 1;
        mean = there ? means[row] : 0;
    };
    const auto keep = [&](int stage) {
        float* const to = of_queries + stage * 3 * N + threadIdx.x;
        if ((int)threadIdx.x < N) to[0] = base, to[N] = log2f(log_total), to[2 * N] = mean;
    };
    load_rows<D, KEYS, THREADS>(own, k + kv * keys * d, first, keys, d);
    load_rows<D, KEYS, THREADS>(values, v + kv * keys * e, first, keys, e);
    bool more_steps = begin < rows;
    if (more_steps) load(0), keep(0);
    Sums<WIDTH, H> sum = {}, value_sum = {};
    for (int stage = 0; more_steps; stage ^= 1) {
        const Sight sight SIGHT(batch);
        const int query = at + half * HALF;
        at += N;
        if (at >= rows) {
            at = begin;
            if (++turn < served) batch = batch_of(turn);
        }
        more_steps = turn < served;
        wait_for_copies();
        __syncthreads();
        if (more_steps) load(stage ^ 1);
        const T* const pair = pairs + stage * PAIR;
        Sums<HALF, H> p = {}, s = {};
        add_product_transposed<D, HALF>(p, own, of_pair, pair, half * HALF);
        to_scores<true, HALF>(p, sight, key, query + lane % 4 * 2, sight.hides(query, first + of_pair + OF_PAIR));
        add_product_transposed<D, HALF>(s, values, of_pair, pair + N * D, half * HALF);
#pragma unroll
        for (int n = 0; n < HALF / 8; ++n) {
            const int column = half * HALF + n * 8 + lane % 4 * 2;
            const float* const from = of_queries + stage * 3 * N + column;
            const Vector<float, 2> level = vector_at<2>(from), log = vector_at<2>(from + N), middle = vector_at<2>(from + 2 * N);
#pragma unroll
            for (int h = 0; h < H; ++h)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float x[2], y[2];
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        x[c] = power_of_two((p[h][n][2 * r + c] - level.at[c]) * LOG2E - log.at[c]);
                        if (level.at[c] == infinity<float>()) x[c] = 0;  // a query that is not there has no weights, of NaN neither
                        y[c] = x[c] * (s[h][n][2 * r + c] - middle.at[c]);
                    }
                    const int to = (of_pair + h * 16) * N + place<N>(lane / 4 + r * 8, column);
                    *reinterpret_cast<u32*>(weights + to) = pack<T>(x[0], x[1]);
                    *reinterpret_cast<u32*>(slopes + to) = pack<T>(y[0], y[1]);
                }
        }
        wait_for_partner(threadIdx.x / 64);
#pragma unroll
        for (int i = 0; i < N; i += 16) {
            u32 x[H][4];
#pragma unroll
            for (int h = 0; h < H; ++h) left_of<N>(x[h], weights, of_pair + 16 * h, i);
            add_part<D, WIDTH>(value_sum, x, pair + N * D, i, half * WIDTH);
#pragma unroll
            for (int h = 0; h < H; ++h) left_of<N>(x[h], slopes, of_pair + 16 * h, i);
            add_part<D, WIDTH>(sum, x, pair, i, half * WIDTH);
        }
        if (more_steps) keep(stage ^ 1);
    }
    wait_for_copies();
    // Queries before `begin` have weights of zero here, which are NaN where all of their weights are; so with their slopes.
    float more = 0, value_more = 0;
    for (i64 b = 0; begin && b < served; ++b) {
        const i64 row = batch_of(b) * rows;
        for (int i = threadIdx.x; i < begin; i += THREADS) {
            const float total = totals[row + i];
            if (total != total) value_more = total;
            more += nan_or_zero(means[row + i]);
        }
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
    store_rows<D, WIDTH>(dk + kv * keys * d, own, sum, of_pair, first + of_pair, keys, half * WIDTH, d, [&](int, int) { return scale; }, poisons);
    store_rows<D, WIDTH>(dv + kv * keys * e, values, value_sum, of_pair, first + of_pair, keys, half * WIDTH, e, [&](int, int) { return 1.0f; }, poisons + d);
}

template <class T>
struct Matrices {
    const T* x;
    float* out;
    int batches, rows, width, parts;
};

// NaN for each column of a matrix with an element that is not finite; `out` is zeros before. The second coordinate of a block says
// of which of three operands.
template <class T>
__global__ void __launch_bounds__(THREADS)
    attention_poison(const T* x0, float* out0, int batches0, int rows0, int width0, int parts0, const T* x1, float* out1, int batches1,
                     int rows1, int width1, int parts1, const T* x2, float* out2, int batches2, int rows2, int width2, int parts2)
{
    const Matrices<T> m = blockIdx.y == 0   ? Matrices<T>{x0, out0, batches0, rows0, width0, parts0}
                          : blockIdx.y == 1 ? Matrices<T>{x1, out1, batches1, rows1, width1, parts1}
                                            : Matrices<T>{x2, out2, batches2, rows2, width2, parts2};
    const T* x = m.x;
    float* const out = m.out;
    const int rows = m.rows, width = m.width, parts = m.parts;
    const i64 batch = blockIdx.x / parts;
    if (batch >= m.batches) return;
    const int vectors = width / 8, part = blockIdx.x % parts;
    x += batch * rows * width;
    for (i64 i = part * THREADS + threadIdx.x; i < (i64)rows * vectors; i += (i64)parts * THREADS) {
        const Vector<T, 8> v = vector_at<8>(x + i * 8);
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (nan_or_zero(wide(v.at[c])) != 0) atomicMax(reinterpret_cast<int*>(out) + batch * width + i % vectors * 8 + c, 0x7fc00000);
    }
}
