// layer_norm (CENTER) and rms_norm (not CENTER) over contiguous rows, forward and backward.
//
// T is the dtype of x, G that of y and its cotangent, W that of weight and bias. A row is read once and kept in registers;
// longer ones are kept in shared memory, and what does not fit there is read again, mostly from the second-level cache.
#include "row.cuh"

template <class A>
struct Scale {
    A mean, inverse;
};

// Statistics of a row in registers: two passes over them, as exact as it gets.
template <bool CENTER, int THREADS, int ITEMS, int VEC, class T>
__device__ inline Scale<Wide<T>> row_scale(const Row<T, THREADS, ITEMS, VEC>& x, int width, double eps)
{
    using A = Wide<T>;
    A mean = A(0), s = A(0);
    if constexpr (CENTER) {
        x.each(width, [&](A v) { s += v; });
        mean = row_sum<THREADS>(s) / A(width);
        s = A(0);
    }
    x.each(width, [&](A v) { s += (v - mean) * (v - mean); });
    const A square = row_sum<THREADS>(s) / A(width);
    return Scale<A>{mean, A(1) / sqrt(square + A(eps))};
}

template <bool CENTER, class T, class G, class W, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS)
    norm_forward(const T* x, const W* weight, const W* bias, G* y, i64 rows, i64 length, double eps)
{
    using A = Wide<T>;
    const int width = (int)length;
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        Row<T, THREADS, ITEMS, VEC> r;
        r.load(x + row * length, width);
        const Scale<A> s = row_scale<CENTER>(r, width, eps);
        each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int column) {
            const Vector<W, VEC> w = vector_at<VEC>(weight + column);
            Vector<W, VEC> b;
            if constexpr (CENTER) b = vector_at<VEC>(bias + column);
            Vector<G, VEC> out;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                A n = (r.at(j, k) - s.mean) * s.inverse * wide(w.at[k]);
                if constexpr (CENTER) n += wide(b.at[k]);
                out.at[k] = narrow<G>(n);
            }
            store_vector<VEC>(y + row * length + column, out);
        });
    }
}

// dx of the rows, and for each block the sums over its rows of what weight and bias get: partial[block][which][column].
// A thread adds up the same columns of every row, in shared memory that only it touches, in an order without bank conflicts.
template <bool CENTER, class T, class G, class W, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(Wide<T>) == 8 || THREADS > 256 ? 1 : VEC == 1 ? 2 : 3)
    norm_backward(const G* g, const T* x, const W* weight, T* dx, Wide<T>* partial, i64 rows, i64 length, double eps)
{
    using A = Wide<T>;
    constexpr int KINDS = CENTER ? 2 : 1;
    const int width = (int)length, t = threadIdx.x;
    DYNAMIC_SHARED(A, sums);
    A* mine = sums + (int)threadIdx.y * (KINDS * ITEMS * THREADS) + t;
#pragma unroll 4
    for (int i = 0; i < KINDS * ITEMS; ++i) mine[i * THREADS] = A(0);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        Row<T, THREADS, ITEMS, VEC> r;
        Row<G, THREADS, ITEMS, VEC> c;
        r.load(x + row * length, width);
        c.load(g + row * length, width);
        const Scale<A> s = row_scale<CENTER>(r, width, eps);
        A along_one = A(0), along_n = A(0);
        each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int column) {
            const Vector<W, VEC> w = vector_at<VEC>(weight + column);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A n = (r.at(j, k) - s.mean) * s.inverse, gi = c.at(j, k);
                mine[(j * VEC + k) * THREADS] += gi * n;
                if constexpr (CENTER) mine[(ITEMS + j * VEC + k) * THREADS] += gi;
                const A gw = gi * wide(w.at[k]);
                along_one += gw;
                along_n += gw * n;
            }
        });
        const Pair<A> p = row_sums<THREADS>(along_one, along_n);
        const A one = CENTER ? p.a / A(width) : A(0), slope = p.b / A(width);
        each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int column) {
            const Vector<W, VEC> w = vector_at<VEC>(weight + column);
            Vector<T, VEC> out;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A n = (r.at(j, k) - s.mean) * s.inverse;
                out.at[k] = narrow<T>((c.at(j, k) * wide(w.at[k]) - one - n * slope) * s.inverse);
            }
            store_vector<VEC>(dx + row * length + column, out);
        });
    }
    if (blockDim.y > 1) __syncthreads();
    A* out = partial + (i64)blockIdx.x * KINDS * length;
    for (int kind = threadIdx.y; kind < KINDS; kind += blockDim.y) {
#pragma unroll 1
        for (int i = 0; i < ITEMS; ++i) {
            const int column = ((i / VEC) * THREADS + t) * VEC + i % VEC;
            if (column >= width) continue;
            A total = A(0);
            for (int y = 0; y < (int)blockDim.y; ++y) total += sums[((y * KINDS + kind) * ITEMS + i) * THREADS + t];
            out[kind * length + column] = total;
        }
    }
}

// ----- rows of any length ---------------------------------------------------------------------------------------------

// f(j, column) for the vectors of a long row that a thread has.
template <int VEC, class F>
__device__ inline void each_long(i64 length, F f)
{
    each_vector<LONG, 0, VEC>(length, f);
}

template <bool CENTER, int VEC, class T>
__device__ inline Scale<Wide<T>> long_row_scale(const LongRow<T, VEC>& x, i64 length, double eps)
{
    using A = Wide<T>;
    if constexpr (CENTER) {
        constexpr int EACH = 8 / VEC < 2 ? 2 : 8 / VEC;  // vectors at a time
        Moments<A> m = Moments<A>::none();
        i64 i = 0;
        for (i64 start = (i64)threadIdx.x * VEC; start < length; start += LONG * VEC * EACH, i += EACH) {
            A v[EACH * VEC];
            int count = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const i64 at = start + j * LONG * VEC;
                Vector<T, VEC> found;
                if (at < length) found = x.first(i + j, at);
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[j * VEC + k] = at < length ? wide(found.at[k]) : A(0);
                count += at < length ? VEC : 0;
            }
            m.add(v, count);
        }
        m = row_moments<LONG>(m);
        return Scale<A>{m.mean, A(1) / sqrt(m.m2 / A(length) + A(eps))};
    } else {
        A s = A(0);
        each_long<VEC>(length, [&](i64 j, i64 column) {
            const Vector<T, VEC> v = x.first(j, column);
#pragma unroll
            for (int k = 0; k < VEC; ++k) s += wide(v.at[k]) * wide(v.at[k]);
        });
        return Scale<A>{A(0), A(1) / sqrt(row_sum<LONG>(s) / A(length) + A(eps))};
    }
}

template <bool CENTER, class T, class G, class W, int VEC>
__global__ void __launch_bounds__(LONG, sizeof(Wide<T>) == 8 ? 1 : 2)
    norm_forward_long(const T* x, const W* weight, const W* bias, G* y, i64 rows, i64 length, int kept, double eps)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const LongRow<T, VEC> r(x + row * length, shared, kept);
        const Scale<A> s = long_row_scale<CENTER>(r, length, eps);
        store_row<LONG, 0, VEC>(y + row * length, length, [&](i64 j, i64 column) {
            const Vector<W, VEC> b = CENTER ? vector_at<VEC>(bias + column) : Vector<W, VEC>{};
            return [=, v = r.vector(j, column), w = vector_at<VEC>(weight + column)](int k) {
                return (wide(v.at[k]) - s.mean) * s.inverse * wide(w.at[k]) + (CENTER ? wide(b.at[k]) : A(0));
            };
        });
    }
}

// dx, and the statistics of each row for `norm_columns`.
template <bool CENTER, class T, class G, class W, int VEC>
__global__ void __launch_bounds__(LONG, sizeof(Wide<T>) == 8 ? 1 : 2) norm_backward_long(const G* g, const T* x, const W* weight, T* dx,
                                                           Wide<T>* scales, i64 rows, i64 length, int kept, double eps)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const LongRow<T, VEC> r(x + row * length, shared, kept);
        const LongRow<G, VEC> c(g + row * length, r.rest(), kept);
        const Scale<A> s = long_row_scale<CENTER>(r, length, eps);
        // Of the elements of a vector: normalised, and the cotangent times the weight.
        const auto pairs = [&](i64 j, i64 column, const Vector<G, VEC>& d) {
            return [=, v = r.vector(j, column), w = vector_at<VEC>(weight + column)](int k) {
                return Pair<A>{(wide(v.at[k]) - s.mean) * s.inverse, wide(d.at[k]) * wide(w.at[k])};
            };
        };
        A along_one = A(0), along_n = A(0);
        each_long<VEC>(length, [&](i64 j, i64 column) {
            const auto pair = pairs(j, column, c.first(j, column));
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                along_one += pair(k).b;
                along_n += pair(k).b * pair(k).a;
            }
        });
        const Pair<A> p = row_sums<LONG>(along_one, along_n);
        const A one = CENTER ? p.a / A(length) : A(0), slope = p.b / A(length);
        store_row<LONG, 0, VEC>(dx + row * length, length, [&](i64 j, i64 column) {
            return [=, pair = pairs(j, column, c.vector(j, column))](int k) {
                return (pair(k).b - one - pair(k).a * slope) * s.inverse;
            };
        });
        if (threadIdx.x == 0) {
            scales[2 * row] = s.mean;
            scales[2 * row + 1] = s.inverse;
        }
    }
}

// Sums over a share of the rows of what weight and bias get, from statistics that are known: blocks of 32 columns by 8 rows.
template <bool CENTER, class T, class G>
__global__ void __launch_bounds__(256)
    norm_columns(const G* g, const T* x, const Wide<T>* scales, Wide<T>* partial, i64 rows, i64 length)
{
    using A = Wide<T>;
    constexpr int KINDS = CENTER ? 2 : 1;
    SHARED(A, tile, 2 * 8 * 33);
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
    A w = A(0), b = A(0);
    if (column < length)
        for (i64 row = (i64)blockIdx.y * 8 + threadIdx.y; row < rows; row += (i64)gridDim.y * 8) {
            const A gi = wide(g[row * length + column]);
            w += gi * ((wide(x[row * length + column]) - scales[2 * row]) * scales[2 * row + 1]);
            b += gi;
        }
    tile[threadIdx.y * 33 + threadIdx.x] = w;
    tile[(8 + threadIdx.y) * 33 + threadIdx.x] = b;
    __syncthreads();
    if (column < length && threadIdx.y < KINDS) {
        A total = A(0);
        for (int y = 0; y < 8; ++y) total += tile[(8 * threadIdx.y + y) * 33 + threadIdx.x];
        partial[((i64)blockIdx.y * KINDS + threadIdx.y) * length + column] = total;
    }
}
