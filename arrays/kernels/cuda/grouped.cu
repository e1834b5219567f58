// Networks of experts on the rows that were sent to them: products of groups of rows, each with matrices of its own.
//
// A pair is a row and one of its choices. Pairs are put in the order of their experts, and of the rows within each. A block
// then multiplies a tile of one expert's pairs; it finds the tile in a list, so that the host need not know how many there are.
//
// TENSOR is the tensor cores (floats of two bytes from compute capability 8.0 on, tiles of 128 rows), else each thread
// multiplies numbers (tiles of 64 rows). Sums are made in float32 (float64 of its own) and in one order.
#include "headers/matrices.cuh"
#include "headers/reduce.cuh"

constexpr int THREADS = 256;

// ----- pairs in the order of their experts ------------------------------------------------------------------------------

// A group's part: `count` pairs, the first of which is at `first` in the order; no expert (-1) beyond the last tile.
struct Tile {
    int expert, first, count;
};

// Calls `use` with each pair from `first` to `last` of one expert, in order. The threads of a block have an expert each.
template <class Use>
__device__ inline void for_pairs(const int* found, int first, int last, int expert, const Use& use)
{
    SHARED(int, some, THREADS);
    for (int at = first; at < last; at += THREADS) {
        const int n = min(THREADS, last - at);
        __syncthreads();  // the ones before have been read, and `found` has been written
        if ((int)threadIdx.x < n) some[threadIdx.x] = found[at + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < n; ++i)
            if (some[i] == expert) use(at + i);
    }
}

// The place of each pair's expert among `numbers` (`experts` where it is none of them), and how many of its pairs each block has.
__global__ void __launch_bounds__(THREADS)
    count_pairs(const i64* chosen, const i64* numbers, int* found, int* counts, int pairs, int experts, int share)
{
    const int first = blockIdx.x * share, last = min(pairs - first, share) + first;
    for (int p = first + threadIdx.x; p < last; p += THREADS) {
        const i64 number = chosen[p];
        const u64 guess = (u64)number - (u64)numbers[0];
        int e = guess < (u64)experts && numbers[guess] == number ? (int)guess : 0;
        while (e < experts && numbers[e] != number) ++e;
        found[p] = e;
    }
    for (int base = 0; base < experts; base += THREADS) {
        const int e = base + threadIdx.x;
        int n = 0;
        for_pairs(found, first, last, e < experts ? e : -1, [&](int) { ++n; });
        if (e < experts) counts[blockIdx.x * experts + e] = n;
    }
}

__global__ void __launch_bounds__(THREADS)
    place_pairs(const int* found, const int* counts, int* order, int* starts, Tile* tiles, int pairs, int experts, int share, int rows, int most)
{
    const int first = blockIdx.x * share, last = min(pairs - first, share) + first;
    int begin = 0, tile = 0;
    for (int base = 0; base < experts; base += THREADS) {
        const int e = base + threadIdx.x;
        int before = 0, all = 0;
        for (int b = 0; e < experts && b < (int)gridDim.x; ++b) {
            const int n = counts[b * experts + e];
            if (b < (int)blockIdx.x) before += n;
            all += n;
        }
        const Pair<i64> sums = prefix_sum<THREADS>((i64)((all + rows - 1) / rows) << 32 | all);  // of tiles and of pairs
        int at = begin + (int)sums.a;
        if (blockIdx.x == 0 && e < experts) {
            starts[e] = at;
            for (int i = 0; i * rows < all; ++i) tiles[tile + (int)(sums.a >> 32) + i] = Tile{e, at + i * rows, min(rows, all - i * rows)};
        }
        at += before;
        for_pairs(found, first, last, e < experts ? e : -1, [&](int pair) { order[at++] = pair; });
        begin += (int)sums.b, tile += (int)(sums.b >> 32);
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) starts[experts] = begin;
        for (int i = tile + threadIdx.x; i < most; i += THREADS) tiles[i] = Tile{-1, 0, 0};
    }
}

// ----- tiles of products ------------------------------------------------------------------------------------------------

template <bool TENSOR>
constexpr int ROWS = TENSOR ? 128 : 64;  // of a tile, and its columns where a block has one product; else SHORT
constexpr int SHORT = 64;
template <class T>
constexpr int DEEP = 64 / (int)sizeof(T);  // elements along the sums
template <int ROWS, int COLUMNS, class T>
constexpr int SIZE = ROWS * STRIDE<COLUMNS, T>;

// The sums of a tile that a thread has: in four rows, EACH columns, of which VEC are neighbours. LANES threads have a row, or one of
// PARTS of it.
template <bool TENSOR, int COLUMNS, class T>
struct Sums {
    static constexpr int EACH = TENSOR ? COLUMNS / 8 : COLUMNS / 16, VEC = TENSOR ? 2 : 1, LANES = TENSOR ? 4 : 16, PARTS = TENSOR ? 2 : 1;
    Wide<T> at[EACH][4] = {};  // TENSOR: two rows of fragments, as a warp has 32 rows of half of the columns

    __device__ static int row(int r)
    {
        return TENSOR ? threadIdx.x / 64 * 32 + r / 2 * 16 + r % 2 * 8 + threadIdx.x % 32 / 4 : threadIdx.x / 16 * 4 + r;
    }
    __device__ static int column(int c)
    {
        return TENSOR ? part() * (COLUMNS / 2) + c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2 : threadIdx.x % 16 + c * 16;
    }
    __device__ static int part() { return TENSOR ? threadIdx.x / 32 % 2 : 0; }
    __device__ Wide<T>& operator()(int r, int c)
    {
        if constexpr (TENSOR)
            return at[r / 2 * (EACH / 2) + c / 2][r % 2 * 2 + c % 2];
        else
            return at[c][r];
    }
};

// sums[FIRST + i] += a b_i, for COUNT tiles b_i that lie one after another. A factor's tile has its rows, or TURNED, its columns.
template <int FIRST, int COUNT, bool LEFT_TURNED, bool RIGHT_TURNED, bool TENSOR, int COLUMNS, class T, int N>
__device__ inline void add_products(Sums<TENSOR, COLUMNS, T> (&sums)[N], const T* a, const T* b)
{
    constexpr int D = DEEP<T>, LEFT = LEFT_TURNED ? ROWS<TENSOR> : D, RIGHT = RIGHT_TURNED ? D : COLUMNS;
    constexpr int NEXT = RIGHT_TURNED ? SIZE<COLUMNS, D, T> : SIZE<D, COLUMNS, T>;
    if constexpr (TENSOR) {
        const int row = threadIdx.x / 64 * 32, column = threadIdx.x / 32 % 2 * (COLUMNS / 2);
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            u32 x[2][4], y[4];
            left_fragment<LEFT_TURNED, LEFT>(x[0], a, row, k);
            left_fragment<LEFT_TURNED, LEFT>(x[1], a, row + 16, k);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int n = 0; n < COLUMNS / 16; n += 2) {
                    right_fragments<RIGHT_TURNED, RIGHT>(y, b + i * NEXT, k, column + n * 8);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        auto* const sum = sums[FIRST + i].at + half * (COLUMNS / 16) + n;
                        multiply_add<T>(sum[0], x[half], y[0], y[1]);
                        multiply_add<T>(sum[1], x[half], y[2], y[3]);
                    }
                }
        }
    } else {
        const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll
        for (int k = 0; k < D; k += 4) {
            Vector<T, 4> x[4], y;
#pragma unroll
            for (int r = 0; r < 4; ++r) x[r] = vector_at<4>(LEFT_TURNED ? a + (k + r) * STRIDE<LEFT, T> + row : a + (row + r) * STRIDE<LEFT, T> + k);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; ++c) {
                    const T* const from = b + i * NEXT;
                    if constexpr (RIGHT_TURNED)
                        y = vector_at<4>(from + (column + c * 16) * STRIDE<RIGHT, T> + k);
                    else
#pragma unroll
                        for (int j = 0; j < 4; ++j) y.at[j] = from[(k + j) * STRIDE<RIGHT, T> + column + c * 16];
#pragma unroll
                    for (int r = 0; r < 4; ++r)
#pragma unroll
                        for (int j = 0; j < 4; ++j) sums[FIRST + i].at[c][r] += wide(LEFT_TURNED ? x[j].at[r] : x[r].at[j]) * wide(y.at[j]);
                }
        }
    }
}

// All steps of a sum: the next one's tiles are on their way while one's are multiplied.
template <int STAGE, class T, class Load, class Add>
__device__ inline void for_steps(T* shared, int steps, const Load& load, const Add& add)
{
    if (steps) load(shared, 0);
    for (int i = 0; i < steps; ++i) {
        wait_for_copies();
        __syncthreads();  // this step's are there, and nobody reads the last one's
        if (i + 1 < steps) load(shared + (i + 1) % 2 * STAGE, i + 1);
        add(shared + i % 2 * STAGE);
    }
}

// VEC neighbours of a result; `aligned` are those that the device stores at once, which end together.
template <int VEC, class T>
__device__ inline void store_part(T* to, const Vector<T, VEC>& v, int left, bool aligned)
{
    if (aligned && 0 < left) store_vector<VEC>(to, v);
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        if (!aligned && i < left) to[i] = v.at[i];
}

__device__ inline int parts_of(int length, int part) { return (length + part - 1) / part; }

// The tile of rows and of columns that a block has: eight tiles of rows take the same columns in turn, as long as these are in the cache.
struct Work {
    int row, column;
    __device__ Work(int rows, int columns)
    {
        const int group = blockIdx.x / (8 * columns), in_group = blockIdx.x % (8 * columns), side = min(8, rows - group * 8);
        row = group * 8 + in_group % side;
        column = in_group / side;
    }
};

// h = silu(x gate) * (x up), by place in the order. BACKWARD, with `g` the cotangents of the rows: the same times the weight of
// its pair, the cotangents of both products, and parts of the sums that are the weights' cotangents.
template <bool BACKWARD, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR && !BACKWARD ? 2 : 1)
    experts_hidden(const T* x, const T* g, const T* gate, const T* up, const T* down, T* h, T* slopes_gate, T* slopes_up, const Wide<T>* weights,
                   const int* order, const Tile* tiles, Wide<T>* parts, int choices, int most, int width, int hidden, bool aligned)
{
    using A = Wide<T>;
    using Own = Sums<TENSOR, SHORT, T>;
    constexpr int D = DEEP<T>, LEFT = SIZE<ROWS<TENSOR>, D, T>, RIGHT = SIZE<D, SHORT, T>, TURNED = SIZE<SHORT, D, T>;
    constexpr int GATES = BACKWARD ? 2 * LEFT : LEFT, STAGE = GATES + 2 * RIGHT + (BACKWARD ? TURNED : 0);
    DYNAMIC_SHARED(T, shared);
    SHARED(int, rows, ROWS<TENSOR>);
    const Work work(most, parts_of(hidden, SHORT));
    const Tile tile = tiles[work.row];
    if (tile.expert < 0) return;
    const int first = work.column * SHORT, left = hidden - first;
    const i64 matrix = (i64)tile.expert * width * hidden;
    for (int i = threadIdx.x; i < tile.count; i += THREADS) rows[i] = order[tile.first + i] / choices;
    __syncthreads();
    Own sums[BACKWARD ? 3 : 2];
    const auto row_at = [&](int i) { return (i64)rows[i] * width; };
    const auto load = [&](T* stage, int step) {
        const int k = step * D;
        const auto in_gate = [&](int i) { return (i64)i * hidden; };
        load_tile<D, ROWS<TENSOR>>(stage, x + k, tile.count, width - k, aligned, row_at);
        load_tile<SHORT, D>(stage + GATES, gate + matrix + (i64)k * hidden + first, width - k, left, aligned, in_gate);
        load_tile<SHORT, D>(stage + GATES + RIGHT, up + matrix + (i64)k * hidden + first, width - k, left, aligned, in_gate);
        if constexpr (BACKWARD) {
            load_tile<D, ROWS<TENSOR>>(stage + LEFT, g + k, tile.count, width - k, aligned, row_at);
            load_tile<D, SHORT>(stage + GATES + 2 * RIGHT, down + matrix + (i64)first * width + k, left, width - k, aligned, [&](int i) { return (i64)i * width; });
        }
    };
    for_steps<STAGE>(shared, parts_of(width, D), load, [&](const T* stage) {
        add_products<0, 2, false, false>(sums, stage, stage + GATES);
        if constexpr (BACKWARD) add_products<2, 1, false, true>(sums, stage + LEFT, stage + GATES + 2 * RIGHT);
    });
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = Own::row(r);
        const bool there = row < tile.count;
        const i64 at = (i64)(tile.first + row) * hidden + first;
        const int pair = BACKWARD && there ? order[tile.first + row] : 0;
        const A weight = BACKWARD && there ? weights[pair] : A(1);
        A part = A(0);
#pragma unroll
        for (int c = 0; c < Own::EACH; c += Own::VEC) {
            const int column = Own::column(c);
            Vector<T, Own::VEC> y, of_gate, of_up;
#pragma unroll
            for (int i = 0; i < Own::VEC; ++i) {
                const A a = sums[0](r, c + i), b = sums[1](r, c + i), s = A(1) / (A(1) + exp(-a)), swish = a * s;
                y.at[i] = narrow<T>(swish * b * weight);
                if constexpr (BACKWARD) {
                    const A slope = sums[2](r, c + i);
                    if (column + i < left) part += slope * (swish * b);
                    of_gate.at[i] = narrow<T>(slope * weight * b * (s + swish * (A(1) - s)));
                    of_up.at[i] = narrow<T>(slope * weight * swish);
                }
            }
            if (!there) continue;
            store_part<Own::VEC>(h + at + column, y, left - column, aligned);
            if constexpr (BACKWARD) {
                store_part<Own::VEC>(slopes_gate + at + column, of_gate, left - column, aligned);
                store_part<Own::VEC>(slopes_up + at + column, of_up, left - column, aligned);
            }
        }
        if constexpr (BACKWARD) {
#pragma unroll
            for (int o = Own::LANES / 2; o; o >>= 1) part += __shfl_xor_sync(WHOLE_WARP, part, o);
            if (there && threadIdx.x % Own::LANES == 0)
                parts[((i64)pair * parts_of(hidden, SHORT) + work.column) * Own::PARTS + Own::part()] = part;
        }
    }
}

// The networks' outputs h down, times their weights, by pair. BACKWARD: the cotangents of x, slopes_gate gate^T + slopes_up up^T.
template <bool BACKWARD, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR ? 2 : 1)
    experts_rows(const T* h, const T* h_up, const T* down, const T* up, Wide<T>* out, const Wide<T>* weights, const int* order, const Tile* tiles,
                 int most, int width, int hidden, bool aligned)
{
    using Own = Sums<TENSOR, ROWS<TENSOR>, T>;
    constexpr int D = DEEP<T>, COLUMNS = ROWS<TENSOR>, LEFT = SIZE<ROWS<TENSOR>, D, T>;
    constexpr int STAGE = LEFT + (BACKWARD ? SIZE<COLUMNS, D, T> : SIZE<D, COLUMNS, T>);
    DYNAMIC_SHARED(T, shared);
    const Work work(most, parts_of(width, COLUMNS));
    const Tile tile = tiles[work.row];
    if (tile.expert < 0) return;
    const int first = work.column * COLUMNS, left = width - first, steps = parts_of(hidden, D);
    const i64 matrix = (i64)tile.expert * width * hidden;
    Own sums[1];
    const auto load = [&](T* stage, int step) {
        const bool second = BACKWARD && step >= steps;
        const int k = (second ? step - steps : step) * D;
        const auto of_hidden = [&](int i) { return (i64)i * hidden; };
        load_tile<D, ROWS<TENSOR>>(stage, (second ? h_up : h) + (i64)tile.first * hidden + k, tile.count, hidden - k, aligned, of_hidden);
        if constexpr (BACKWARD)
            load_tile<D, COLUMNS>(stage + LEFT, (second ? up : down) + matrix + (i64)first * hidden + k, left, hidden - k, aligned, of_hidden);
        else
            load_tile<COLUMNS, D>(stage + LEFT, down + matrix + (i64)k * width + first, hidden - k, left, aligned, [&](int i) { return (i64)i * width; });
    };
    for_steps<STAGE>(shared, BACKWARD ? 2 * steps : steps, load, [&](const T* stage) { add_products<0, 1, false, BACKWARD>(sums, stage, stage + LEFT); });
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = Own::row(r);
        if (row >= tile.count) continue;
        const int pair = order[tile.first + row];
        const Wide<T> weight = BACKWARD ? Wide<T>(1) : weights[pair];
#pragma unroll
        for (int c = 0; c < Own::EACH; c += Own::VEC) {
            const int column = Own::column(c);
            Vector<Wide<T>, Own::VEC> y;
#pragma unroll
            for (int i = 0; i < Own::VEC; ++i) y.at[i] = sums[0](r, c + i) * weight;
            store_part<Own::VEC>(out + (i64)pair * width + first + column, y, left - column, aligned);
        }
    }
}

// Cotangents of matrices: for each expert the product a^T b of its pairs' rows, of COUNT right factors, zeros where it has no pairs.
// With two, `a` is by row and `b` by place in the order; with one `a` is by place, and `b` by row.
template <int COUNT, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR ? 2 : 1)
    experts_matrices(const T* a, const T* b, const T* b_second, T* out, T* out_second, const int* order, const int* starts, int choices,
                     int rows, int columns, bool aligned)
{
    constexpr int D = DEEP<T>, COLUMNS = COUNT == 2 ? SHORT : ROWS<TENSOR>;
    constexpr int LEFT = SIZE<D, ROWS<TENSOR>, T>, RIGHT = SIZE<D, COLUMNS, T>, STAGE = LEFT + COUNT * RIGHT;
    using Own = Sums<TENSOR, COLUMNS, T>;
    DYNAMIC_SHARED(T, shared);
    const int across = parts_of(columns, COLUMNS), down = parts_of(rows, ROWS<TENSOR>);
    const int expert = blockIdx.x / (across * down), row = blockIdx.x / across % down * ROWS<TENSOR>, column = blockIdx.x % across * COLUMNS;
    const int first = starts[expert], count = starts[expert + 1] - first;
    Own sums[COUNT];
    const auto load = [&](T* stage, int step) {
        const int k = step * D, here = first + k;
        const auto place = [&](int i, bool by_row) { return (i64)(by_row ? order[here + i] / choices : here + i); };
        const auto of_a = [&](int i) { return place(i, COUNT == 2) * rows; };
        const auto of_b = [&](int i) { return place(i, COUNT == 1) * columns; };
        load_tile<ROWS<TENSOR>, D>(stage, a + row, count - k, rows - row, aligned, of_a);
        load_tile<COLUMNS, D>(stage + LEFT, b + column, count - k, columns - column, aligned, of_b);
        if constexpr (COUNT == 2) load_tile<COLUMNS, D>(stage + LEFT + RIGHT, b_second + column, count - k, columns - column, aligned, of_b);
    };
    for_steps<STAGE>(shared, parts_of(count, D), load, [&](const T* stage) { add_products<0, COUNT, true, false>(sums, stage, stage + LEFT); });
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < Own::EACH; c += Own::VEC) {
                const int at = row + Own::row(r), x = column + Own::column(c);
                Vector<T, Own::VEC> y;
#pragma unroll
                for (int j = 0; j < Own::VEC; ++j) y.at[j] = narrow<T>(sums[i](r, c + j));
                if (at < rows) store_part<Own::VEC>((i ? out_second : out) + ((i64)expert * rows + at) * columns + x, y, columns - x, aligned);
            }
}

// Row i of the result is the sum of `each` rows from row i * each on, without those whose pair has no expert here: each row is a
// pair's, or with `together` all that are summed are.
template <class T, int VEC>
__global__ void __launch_bounds__(THREADS)
    sum_pairs(const Wide<T>* values, const int* found, T* out, i64 count, int width, int each, bool together, int experts)
{
    const int vectors = width / VEC;
    const i64 total = count * vectors;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < total; i += (i64)gridDim.x * THREADS) {
        const Element at(i, vectors, total <= 0xffffffffLL);
        Vector<Wide<T>, VEC> sum{};
        for (int j = 0; j < each; ++j) {
            const i64 row = at.row * each + j;
            if (found[together ? at.row : row] == experts) continue;
            const auto v = vector_at<VEC>(values + row * width + at.column * VEC);
#pragma unroll
            for (int c = 0; c < VEC; ++c) sum.at[c] += v.at[c];
        }
        Vector<T, VEC> y;
#pragma unroll
        for (int c = 0; c < VEC; ++c) y.at[c] = narrow<T>(sum.at[c]);
        store_vector<VEC>(out + i * VEC, y);
    }
}
