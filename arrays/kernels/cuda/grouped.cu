// Networks of experts on the rows that were sent to them: products of groups of rows, each with matrices of its own.
//
// A pair is a row and one of its choices. Pairs are put in the order of their experts, and of the rows within each. A block
// then multiplies a tile of one expert's pairs; it finds the tile in a list, so that the host need not know how many there are.
//
// TENSOR is the tensor cores (floats of two bytes from compute capability 8.0 on), else each thread multiplies numbers. Sums are made in
// float32 (float64 of its own) and in one order.
#include "headers/reduce.cuh"
#include "headers/stages.cuh"

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

// `order` and `sources` are the pairs and their rows.
__global__ void __launch_bounds__(THREADS)
    place_pairs(const int* found, const int* counts, int* order, int* sources, int* starts, Tile* tiles, int pairs, int experts, int share, int choices,
                int rows, int most)
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
        for_pairs(found, first, last, e < experts ? e : -1, [&](int pair) { order[at] = pair, sources[at++] = pair / choices; });
        begin += (int)sums.b, tile += (int)(sums.b >> 32);
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) starts[experts] = begin;
        for (int i = tile + threadIdx.x; i < most; i += THREADS) tiles[i] = Tile{-1, 0, 0};
    }
}

// ----- tiles of products ------------------------------------------------------------------------------------------------

// A block has ROWS rows, and two tiles of HALF columns: of two matrices, or neighbours in one.
constexpr int ROWS = 128;
template <bool TENSOR>
constexpr int HALF = TENSOR ? 128 : 64;
template <bool TENSOR, class T>
constexpr int DEEP = TENSOR ? 64 : 64 / (int)sizeof(T);  // elements along the sums

// Tiles lie so that what eight lanes read at once is in different banks: for TENSOR the vectors of a row of 128 or 256 bytes change
// places with its number, else 16 bytes that nobody uses follow each row.
template <bool TENSOR, int COLUMNS, class T>
__device__ inline int place(int row, int column)
{
    if constexpr (TENSOR)
        return row * COLUMNS + (column / 8 ^ row % 8) * 8 + column % 8;
    else
        return row * STRIDE<COLUMNS, T> + column;
}
template <bool TENSOR, int ROWS, int COLUMNS, class T>
constexpr int SIZE = ROWS * (TENSOR ? COLUMNS : STRIDE<COLUMNS, T>);

// The tiles of a step. A factor's tile has its rows, or TURNED, its columns.
template <bool LEFT_TURNED, bool RIGHT_TURNED, bool TENSOR, class T>
struct Stage {
    static constexpr int D = DEEP<TENSOR, T>, H = HALF<TENSOR>;
    static constexpr int LEFT = LEFT_TURNED ? SIZE<TENSOR, D, ROWS, T> : SIZE<TENSOR, ROWS, D, T>;
    static constexpr int RIGHT = RIGHT_TURNED ? SIZE<TENSOR, H, D, T> : SIZE<TENSOR, D, H, T>, ALL = LEFT + 2 * RIGHT;

    __device__ static int left(int row, int k) { return LEFT_TURNED ? place<TENSOR, ROWS, T>(k, row) : place<TENSOR, D, T>(row, k); }
    __device__ static int right(int half, int k, int column)
    {
        return LEFT + half * RIGHT + (RIGHT_TURNED ? place<TENSOR, D, T>(column, k) : place<TENSOR, H, T>(k, column));
    }
};

// The vectors of a tile of N rows of D elements that a thread copies: EACH of them, STEP rows apart.
template <int D, int N, class T>
struct Copies {
    static constexpr int VEC = 16 / (int)sizeof(T), STEP = THREADS / (D / VEC), EACH = N / STEP;
    static_assert(EACH * STEP == N, "each thread copies as many");

    __device__ static int row(int i) { return threadIdx.x / (D / VEC) + i * STEP; }
    __device__ static int column() { return threadIdx.x % (D / VEC) * VEC; }
};

// Row i begins at `matrix + at(i, j)`, if it is the thread's vector j, and has `width` elements; zeros beyond, and from row `count` on.
// `aligned`: all begin and end where the device loads 16 bytes. They are there after a wait for them and the next barrier.
template <bool TENSOR, int D, int N, class T, class At>
__device__ inline void copy_tile(T* tile, const T* matrix, int count, int width, bool aligned, const At& at)
{
    using Own = Copies<D, N, T>;
    const int column = Own::column();
    const auto there = [&](int row) { return row < count && column < width; };
    const auto to = [&](int row) { return tile + place<TENSOR, D, T>(row, column); };
    if (aligned)
#pragma unroll
        for (int j = 0; j < Own::EACH; ++j) {
            const int row = Own::row(j);
            copy_later(to(row), there(row) ? matrix + at(row, j) + column : matrix, there(row));
        }
    else
#pragma unroll
        for (int j = 0; j < Own::EACH; ++j) {
            const int row = Own::row(j);
            const T* const from = there(row) ? matrix + at(row, j) + column : matrix;
#pragma unroll 1
            for (int c = 0; c < Own::VEC; ++c) to(row)[c] = there(row) && column + c < width ? from[c] : T{};
        }
}

// The sums of both tiles that a thread has: in each, EACH rows of SPAN columns, of which VEC are neighbours. LANES threads have a row,
// or one of PARTS of it.
template <bool LEFT_TURNED, bool RIGHT_TURNED, bool TENSOR, class T>
struct Sums {
    static constexpr int EACH = 8, SPAN = TENSOR ? 8 : 4, LANES = TENSOR ? 4 : 8, PARTS = TENSOR ? 4 : 2;
    static constexpr int VEC = TENSOR ? 2 : RIGHT_TURNED ? 1 : sizeof(T) == 8 ? 2 : 4;
    Wide<T> at[2][EACH / 2][SPAN / 2][4] = {};  // TENSOR: a warp has 64 rows of 32 columns, in fragments of 16 x 8

    __device__ static int warp() { return threadIdx.x / 32; }
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int part() { return TENSOR ? warp() % 4 : warp() % 2; }
    __device__ static int down() { return warp() / 2 * 4 + lane() / 8; }  // without TENSOR, the place among 16 x 16 threads
    __device__ static int across() { return part() * 8 + lane() % 8; }

    __device__ static int row(int r)
    {
        if (TENSOR) return warp() / 4 * 64 + r / 2 * 16 + r % 2 * 8 + lane() / 4;
        return LEFT_TURNED ? r / 4 * 64 + down() * 4 + r % 4 : r * 16 + down();
    }
    __device__ static int column(int c)
    {
        if (TENSOR) return part() * 32 + c / 2 * 8 + lane() % 4 * 2 + c % 2;
        return RIGHT_TURNED ? c * 16 + across() : across() * 4 + c;
    }
    __device__ Wide<T>& operator()(int half, int r, int c) { return at[half][r / 2][c / 2][r % 2 * 2 + c % 2]; }
};

// 16 along the sums of a warp's rows and columns: eight loads of shared memory for 32 products.
template <bool LEFT_TURNED, bool RIGHT_TURNED, class T>
struct Fragments {
    using Own = Stage<LEFT_TURNED, RIGHT_TURNED, true, T>;
    u32 left[4][4], right[4][4];

    __device__ void load(const T* stage, int k)
    {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64, column = threadIdx.x / 32 % 4 * 32;
        const int near = lane % 16, far = lane / 16 * 8, inner = lane / 8 % 2 * 8, outer = far + lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if constexpr (LEFT_TURNED)
                load_matrices<true>(left[i], stage + Own::left(row + i * 16 + inner, k + outer));
            else
                load_matrices<false>(left[i], stage + Own::left(row + i * 16 + near, k + far));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if constexpr (RIGHT_TURNED)
                load_matrices<false>(right[i], stage + Own::right(i / 2, k + inner, column + i % 2 * 16 + outer));
            else
                load_matrices<true>(right[i], stage + Own::right(i / 2, k + near, column + i % 2 * 16 + far));
    }

    __device__ void add_products(Sums<LEFT_TURNED, RIGHT_TURNED, true, T>& sums) const
    {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) multiply_add<T>(sums.at[n / 2][m][n % 2 * 2 + i], left[m], right[n][i * 2], right[n][i * 2 + 1]);
    }
};

// The same number by number, for all of a step.
template <bool LEFT_TURNED, bool RIGHT_TURNED, class T>
__device__ inline void add_numbers(Sums<LEFT_TURNED, RIGHT_TURNED, false, T>& sums, const T* stage)
{
    using Own = Stage<LEFT_TURNED, RIGHT_TURNED, false, T>;
    using To = Sums<LEFT_TURNED, RIGHT_TURNED, false, T>;
    constexpr int RUN = 2;  // along the sums: more would not fit the registers
#pragma unroll 1
    for (int k = 0; k < Own::D; k += RUN) {
        Vector<T, LEFT_TURNED ? 4 : RUN> x[LEFT_TURNED ? 2 * RUN : 8];
        if constexpr (LEFT_TURNED)
#pragma unroll
            for (int i = 0; i < 2 * RUN; ++i) x[i] = vector_at<4>(stage + Own::left(To::row(i / RUN * 4), k + i % RUN));
        else
#pragma unroll
            for (int r = 0; r < 8; ++r) x[r] = vector_at<RUN>(stage + Own::left(To::row(r), k));
        const auto left = [&](int r, int i) { return wide(LEFT_TURNED ? x[r / 4 * RUN + i].at[r % 4] : x[r].at[i]); };
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if constexpr (RIGHT_TURNED) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const auto y = vector_at<RUN>(stage + Own::right(half, k, To::column(c)));
#pragma unroll
                    for (int r = 0; r < 8; ++r)
#pragma unroll
                        for (int i = 0; i < RUN; ++i) sums(half, r, c) += left(r, i) * wide(y.at[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const auto y = vector_at<4>(stage + Own::right(half, k + i, To::column(0)));
#pragma unroll
                    for (int r = 0; r < 8; ++r)
#pragma unroll
                        for (int c = 0; c < 4; ++c) sums(half, r, c) += left(r, i) * wide(y.at[c]);
                }
            }
    }
}

// Adds the products of all steps, whose tiles `load(stage, step)` begins to copy, in the order of the steps.
template <bool LEFT_TURNED, bool RIGHT_TURNED, bool TENSOR, class T, class Load>
__device__ inline void add_products(Sums<LEFT_TURNED, RIGHT_TURNED, TENSOR, T>& sums, T* shared, int stages, int steps, const Load& load)
{
    using Own = Stage<LEFT_TURNED, RIGHT_TURNED, TENSOR, T>;
    if (steps == 0) return;
    Ring ring(stages);
    const auto begin = [&](int stage, int step) {
        if (step < steps) load(shared + stage * Own::ALL, step);
        close_copies();
    };
    __syncthreads();  // nobody reads tiles of other sums
    for (int i = 0; i + 1 < stages; ++i) begin(i, i);
    if constexpr (TENSOR) {
        // Fragments are loaded while those before them are multiplied, over the end of a step too.
        Fragments<LEFT_TURNED, RIGHT_TURNED, T> fragments[2];
        ring.wait();
        fragments[0].load(shared, 0);
        for (int i = 0; i < steps; ++i, ring.turn()) {
            begin(ring.free, i + stages - 1);
#pragma unroll
            for (int k = 16; k <= Own::D; k += 16) {
                if (k == Own::D) ring.wait();
                fragments[k / 16 % 2].load(shared + (k < Own::D ? ring.now : ring.next()) * Own::ALL, k % Own::D);
                fragments[(k / 16 + 1) % 2].add_products(sums);
            }
        }
    } else
        for (int i = 0; i < steps; ++i, ring.turn()) {
            ring.wait();
            begin(ring.free, i + stages - 1);
            add_numbers(sums, shared + ring.now * Own::ALL);
        }
}

// VEC neighbours of an array; `aligned` are those that the device moves at once, which end together.
template <int VEC, class T>
__device__ inline void store_part(T* to, const Vector<T, VEC>& v, int left, bool aligned)
{
    if (aligned && 0 < left) store_vector<VEC>(to, v);
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        if (!aligned && i < left) to[i] = v.at[i];
}
template <int VEC, class T>
__device__ inline Vector<T, VEC> load_part(const T* from, int left, bool aligned)
{
    if (aligned && 0 < left) return vector_at<VEC>(from);
    Vector<T, VEC> v{};
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        if (!aligned && i < left) v.at[i] = from[i];
    return v;
}

// A number of the sums in two of T: a float32 in two short ones, so that it waits where two results will be.
template <class T>
__device__ inline void split(Wide<T> x, T& low, T& high)
{
    if constexpr (sizeof(T) == 2) {
        low.bits = (unsigned short)__float_as_uint(x);
        high.bits = (unsigned short)(__float_as_uint(x) >> 16);
    } else
        low = x, high = T(0);
}
template <class T>
__device__ inline Wide<T> joined(T low, T high)
{
    if constexpr (sizeof(T) == 2)
        return __uint_as_float(low.bits | (u32)high.bits << 16);
    else
        return low;
}

// Where results have two bytes, by the device's quick instructions: some 20 bits are right.
template <class T>
__device__ inline Wide<T> sigmoid(Wide<T> a)
{
#ifndef EMULATED
    if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-a));
#endif
    return Wide<T>(1) / (Wide<T>(1) + exp(-a));
}

__device__ inline int parts_of(int length, int part) { return (length + part - 1) / part; }

// The tile of rows and of columns that a block has: some tiles of rows take the same columns in turn, as long as these are in the cache.
struct Work {
    static constexpr int SIDE = 16;
    int row, column;
    __device__ Work(int block, int rows, int columns)
    {
        const int group = block / (SIDE * columns), in_group = block % (SIDE * columns), side = min(SIDE, rows - group * SIDE);
        row = group * SIDE + in_group % side;
        column = in_group / side;
    }
};

// The rows that a thread copies of a tile of the rows of pairs.
template <int N>
struct Sources {
    int at[N];

    template <class Own>
    __device__ void find(const Own&, const int* sources, int count)
    {
#pragma unroll
        for (int j = 0; j < N; ++j) at[j] = Own::row(j) < count ? sources[Own::row(j)] : 0;
    }
};

// h = silu(x gate) * (x up), by place in the order. BACKWARD, with `g` the cotangents of the rows: the same times the weight of
// its pair, the cotangents of both products, and parts of the sums that are the weights' cotangents.
template <bool BACKWARD, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR || sizeof(T) == 8 ? 1 : 2)
    experts_hidden(const T* x, const T* g, const T* gate, const T* up, const T* down, T* h, T* slopes_gate, T* slopes_up, const Wide<T>* weights,
                   const int* order, const int* sources, const Tile* tiles, Wide<T>* parts, int most, int width, int hidden, bool aligned, int stages)
{
    using A = Wide<T>;
    using Own = Sums<false, false, TENSOR, T>;
    constexpr int D = DEEP<TENSOR, T>, H = HALF<TENSOR>, COLUMNS = BACKWARD ? 2 * H : H;
    using Left = Copies<D, ROWS, T>;
    DYNAMIC_SHARED(T, shared);
    SHARED(int, pairs, ROWS);
    SHARED(A, factors, ROWS);
    const Work work(blockIdx.x, most, parts_of(hidden, COLUMNS));
    const Tile tile = tiles[work.row];
    if (tile.expert < 0) return;
    const int begin = work.column * COLUMNS, steps = parts_of(width, D);
    const i64 matrix = (i64)tile.expert * width * hidden;
    for (int i = threadIdx.x; BACKWARD && i < tile.count; i += THREADS) {
        pairs[i] = order[tile.first + i];
        factors[i] = weights[pairs[i]];
    }
    Sources<Left::EACH> rows;
    rows.find(Left(), sources + tile.first, tile.count);
    const auto row_at = [&](int, int j) { return (i64)rows.at[j] * width; };
    if constexpr (BACKWARD) {  // g down^T waits where the cotangents will be
        using Down = Sums<false, true, TENSOR, T>;
        using Of = Stage<false, true, TENSOR, T>;
        Down sums;
        add_products(sums, shared, stages, steps, [&](T* stage, int step) {
            const int k = step * D;
            copy_tile<TENSOR, D, ROWS>(stage, g + k, tile.count, width - k, aligned, row_at);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = begin + half * H;
                copy_tile<TENSOR, D, H>(stage + Of::LEFT + half * Of::RIGHT, down + matrix + (i64)first * width + k, hidden - first, width - k, aligned,
                                        [&](int i, int) { return (i64)i * width; });
            }
        });
#pragma unroll
        for (int r = 0; r < Down::EACH; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int c = 0; c < Down::SPAN; c += Down::VEC) {
                    const int column = begin + half * H + Down::column(c);
                    const i64 at = (i64)(tile.first + Down::row(r)) * hidden + column;
                    Vector<T, Down::VEC> low, high;
#pragma unroll
                    for (int i = 0; i < Down::VEC; ++i) split(sums(half, r, c + i), low.at[i], high.at[i]);
                    if (Down::row(r) >= tile.count) continue;
                    store_part<Down::VEC>(slopes_gate + at, low, hidden - column, aligned);
                    if (sizeof(T) == 2) store_part<Down::VEC>(slopes_up + at, high, hidden - column, aligned);
                }
    }
#pragma unroll 1
    for (int first = begin; first < min(hidden, begin + COLUMNS); first += H) {
        using Of = Stage<false, false, TENSOR, T>;
        const int left = hidden - first;
        Own sums;
        add_products(sums, shared, stages, steps, [&](T* stage, int step) {
            const int k = step * D;
            const auto of_hidden = [&](int i, int) { return (i64)i * hidden; };
            copy_tile<TENSOR, D, ROWS>(stage, x + k, tile.count, width - k, aligned, row_at);
            copy_tile<TENSOR, H, D>(stage + Of::LEFT, gate + matrix + (i64)k * hidden + first, width - k, left, aligned, of_hidden);
            copy_tile<TENSOR, H, D>(stage + Of::LEFT + Of::RIGHT, up + matrix + (i64)k * hidden + first, width - k, left, aligned, of_hidden);
        });
        const auto at = [&](int r) { return (i64)(tile.first + Own::row(r)) * hidden + first; };
        constexpr int BATCH = TENSOR ? 4 : 1;  // rows whose products with `down` are on their way together
        Vector<T, Own::VEC> low[BATCH][Own::SPAN / Own::VEC], high[BATCH][Own::SPAN / Own::VEC];
#pragma unroll
        for (int r = 0; r < Own::EACH; ++r) {
            const int row = Own::row(r);
            const bool there = row < tile.count;
            const A weight = BACKWARD && there ? factors[row] : A(1);
            A part = A(0);
#pragma unroll
            for (int q = r; BACKWARD && r % BATCH == 0 && q < r + BATCH; ++q)
#pragma unroll
                for (int c = 0; c < Own::SPAN; c += Own::VEC) {
                    const int column = Own::column(c), n = Own::row(q) < tile.count ? left - column : 0;
                    const i64 from = n > 0 ? at(q) + column : 0;
                    low[q % BATCH][c / Own::VEC] = load_part<Own::VEC>(slopes_gate + from, n, aligned);
                    if (sizeof(T) == 2) high[q % BATCH][c / Own::VEC] = load_part<Own::VEC>(slopes_up + from, n, aligned);
                }
#pragma unroll
            for (int c = 0; c < Own::SPAN; c += Own::VEC) {
                const int column = Own::column(c);
                Vector<T, Own::VEC> y, of_gate, of_up;
#pragma unroll
                for (int i = 0; i < Own::VEC; ++i) {
                    const A a = sums(0, r, c + i), b = sums(1, r, c + i), s = sigmoid<T>(a), swish = a * s;
                    y.at[i] = narrow<T>(swish * b * weight);
                    if constexpr (BACKWARD) {
                        const A slope = joined(low[r % BATCH][c / Own::VEC].at[i], high[r % BATCH][c / Own::VEC].at[i]);
                        if (column + i < left) part += slope * (swish * b);
                        of_gate.at[i] = narrow<T>(slope * weight * b * (s + swish * (A(1) - s)));
                        of_up.at[i] = narrow<T>(slope * weight * swish);
                    }
                }
                if (!there) continue;
                store_part<Own::VEC>(h + at(r) + column, y, left - column, aligned);
                if constexpr (BACKWARD) {
                    store_part<Own::VEC>(slopes_gate + at(r) + column, of_gate, left - column, aligned);
                    store_part<Own::VEC>(slopes_up + at(r) + column, of_up, left - column, aligned);
                }
            }
            if constexpr (BACKWARD) {
#pragma unroll
                for (int o = Own::LANES / 2; o; o >>= 1) part += __shfl_xor_sync(WHOLE_WARP, part, o);
                if (there && threadIdx.x % Own::LANES == 0)
                    parts[((i64)pairs[row] * parts_of(hidden, H) + first / H) * Own::PARTS + Own::part()] = part;
            }
        }
    }
}

// The networks' outputs h down, times their weights, by pair. BACKWARD: the cotangents of x, slopes_gate gate^T + slopes_up up^T.
template <bool BACKWARD, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR || sizeof(T) == 8 ? 1 : 2)
    experts_rows(const T* h, const T* h_up, const T* down, const T* up, Wide<T>* out, const Wide<T>* weights, const int* order, const Tile* tiles,
                 int most, int width, int hidden, bool aligned, int stages)
{
    using Own = Sums<false, BACKWARD, TENSOR, T>;
    using Of = Stage<false, BACKWARD, TENSOR, T>;
    constexpr int D = DEEP<TENSOR, T>, H = HALF<TENSOR>;
    DYNAMIC_SHARED(T, shared);
    const Work work(blockIdx.x, most, parts_of(width, 2 * H));
    const Tile tile = tiles[work.row];
    if (tile.expert < 0) return;
    const int begin = work.column * 2 * H, steps = parts_of(hidden, D);
    const i64 matrix = (i64)tile.expert * width * hidden;
    Own sums;
    add_products(sums, shared, stages, BACKWARD ? 2 * steps : steps, [&](T* stage, int step) {
        const bool second = BACKWARD && step >= steps;
        const int k = (second ? step - steps : step) * D;
        const auto of_hidden = [&](int i, int) { return (i64)i * hidden; };
        copy_tile<TENSOR, D, ROWS>(stage, (second ? h_up : h) + (i64)tile.first * hidden + k, tile.count, hidden - k, aligned, of_hidden);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = begin + half * H;
            T* const to = stage + Of::LEFT + half * Of::RIGHT;
            if constexpr (BACKWARD)
                copy_tile<TENSOR, D, H>(to, (second ? up : down) + matrix + (i64)first * hidden + k, width - first, hidden - k, aligned, of_hidden);
            else
                copy_tile<TENSOR, H, D>(to, down + matrix + (i64)k * width + first, hidden - k, width - first, aligned, [&](int i, int) { return (i64)i * width; });
        }
    });
#pragma unroll
    for (int r = 0; r < Own::EACH; ++r) {
        const int row = Own::row(r);
        if (row >= tile.count) continue;
        const int pair = order[tile.first + row];
        const Wide<T> weight = BACKWARD ? Wide<T>(1) : weights[pair];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < Own::SPAN; c += Own::VEC) {
                const int column = begin + half * H + Own::column(c);
                Vector<Wide<T>, Own::VEC> y;
#pragma unroll
                for (int i = 0; i < Own::VEC; ++i) y.at[i] = sums(half, r, c + i) * weight;
                store_part<Own::VEC>(out + (i64)pair * width + column, y, width - column, aligned);
            }
    }
}

// Cotangents of matrices: for each expert the product a^T b of its pairs' rows, of COUNT right factors, zeros where it has no pairs.
// With two, `a` is by row and `b` by place in the order; with one `a` is by place, and `b` by row.
template <int COUNT, bool TENSOR, class T>
__global__ void __launch_bounds__(THREADS, TENSOR || sizeof(T) == 8 ? 1 : 2)
    experts_matrices(const T* a, const T* b, const T* b_second, T* out, T* out_second, const int* sources, const int* starts, int rows, int columns,
                     bool aligned, int stages)
{
    using Own = Sums<true, false, TENSOR, T>;
    using Of = Stage<true, false, TENSOR, T>;
    constexpr int D = DEEP<TENSOR, T>, H = HALF<TENSOR>, COLUMNS = COUNT == 2 ? H : 2 * H;
    using Gathered = Copies<COUNT == 2 ? ROWS : H, D, T>;
    DYNAMIC_SHARED(T, shared);
    const int across = parts_of(columns, COLUMNS), down = parts_of(rows, ROWS), expert = blockIdx.x / (across * down);
    const Work work(blockIdx.x % (across * down), down, across);
    const int row = work.row * ROWS, column = work.column * COLUMNS;
    const int first = starts[expert], count = starts[expert + 1] - first;
    Own sums;
    Sources<Gathered::EACH> next;  // of the step that is copied next: it does not wait for them
    next.find(Gathered(), sources + first, count);
    add_products(sums, shared, stages, parts_of(count, D), [&](T* stage, int step) {
        const int k = step * D, here = first + k;
        const auto of_a = [&](int i, int j) { return (i64)(COUNT == 2 ? next.at[j] : here + i) * rows; };
        const auto of_b = [&](int i, int j) { return (i64)(COUNT == 1 ? next.at[j] : here + i) * columns; };
        copy_tile<TENSOR, ROWS, D>(stage, a + row, count - k, rows - row, aligned, of_a);
        copy_tile<TENSOR, H, D>(stage + Of::LEFT, b + column, count - k, columns - column, aligned, of_b);
        const int other = COUNT == 2 ? column : column + H;
        copy_tile<TENSOR, H, D>(stage + Of::LEFT + Of::RIGHT, (COUNT == 2 ? b_second : b) + other, count - k, columns - other, aligned, of_b);
        next.find(Gathered(), sources + here + D, count - k - D);
    });
#pragma unroll
    for (int r = 0; r < Own::EACH; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < Own::SPAN; c += Own::VEC) {
                const int at = row + Own::row(r), to = column + (COUNT == 1 ? half * H : 0) + Own::column(c);
                T* const result = COUNT == 2 && half ? out_second : out;
                Vector<T, Own::VEC> y;
#pragma unroll
                for (int j = 0; j < Own::VEC; ++j) y.at[j] = narrow<T>(sums(half, r, c + j));
                if (at < rows) store_part<Own::VEC>(result + ((i64)expert * rows + at) * columns + to, y, columns - to, aligned);
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
