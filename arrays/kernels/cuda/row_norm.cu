// layer_norm (CENTER) and rms_norm (not CENTER) over contiguous rows, forward and backward; also of the sum of two arrays.
//
// T is the dtype of x, G that of y, of its cotangent, and of weight and bias. A row is read once and kept in registers (ITEMS is not 0);
// longer ones are kept in shared memory, and what does not fit there is read again, mostly from the second-level cache. ENDS says
// that rows begin within a vector, or parameters do, which are then read element by element, from the first-level cache.
#include "headers/row.cuh"

// What a parameter has for a place of a row.
template <bool ENDS, class T, int N, class I>
__device__ inline Vector<T, N> parameter_at(const T* p, Place<N, I> place)
{
    if constexpr (!ENDS) return vector_at<N>(p + place.column);
    Vector<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] = p[place.column + k];
    return v;
}

// A row that is needed soon is brought to the second-level cache, by one thread: no register waits for it.
template <class T>
__device__ inline void prefetch(const T* row, i64 length)
{
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    const u64 start = (reinterpret_cast<u64>(row) + 15) & ~15ULL, end = reinterpret_cast<u64>(row + length) & ~15ULL;
    if (threadIdx.x == 0 && start < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"((u32)(end - start)));
#endif
}

// y, and (ADD) the sum of x and residual, of which y is the norm.
template <bool CENTER, bool ADD, class T, class G, int THREADS, int ITEMS, bool ENDS>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, ITEMS && sizeof(T) > 2 || sizeof(Wide<T>) == 8 ? 1 : 2)
    norm_forward(const T* x, const T* residual, const G* weight, const G* bias, G* y, T* total, i64 rows, i64 length, int kept, double eps)
{
    using A = Wide<T>;
    constexpr int VEC = 16 / sizeof(T);
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const i64 at = row * length;
        const Shape<T, THREADS, ITEMS, ENDS, ADD> cut(x + at, length);
        const auto r = [&] {
            if constexpr (ADD) return CutRow<T, THREADS, ITEMS, VEC, Total<T>>({x + at, residual + at, total + at}, cut, shared, kept);
            else return CutRow<T, THREADS, ITEMS, VEC>(x + at, cut, shared, kept);
        }();
        const Scale<A> s = row_scale<CENTER>(r, cut, length, eps);
        cut.store(y + at, [&](auto p) {
            Vector<G, p.size> b{};
            if constexpr (CENTER) b = parameter_at<ENDS>(bias, p);
            return [=, v = r(p), w = parameter_at<ENDS>(weight, p)](int k) {
                const A n = (wide(v.at[k]) - s.mean) * s.inverse * wide(w.at[k]);
                return CENTER ? n + wide(b.at[k]) : n;
            };
        });
    }
}

// dx (JOIN: rounded, plus the cotangent that x has besides), and for each block the sums over its rows of what weight and bias get:
// out[block][which][column]. A thread adds up the same columns of every row, in shared memory that only it touches: the rows of a block
// must begin at the same place of a vector. Of longer rows only the statistics are left, for `norm_columns`: out[row][which].
template <bool CENTER, bool JOIN, class T, class G, class D, int THREADS, int ITEMS, bool ENDS>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(Wide<T>) == 8 || (ITEMS ? THREADS > 256 : ENDS && JOIN) ? 1 : ITEMS ? 3 : 2)
    norm_backward(const G* g, const T* x, const G* weight, const D* joined, D* dx, Wide<T>* out, i64 rows, i64 length, int kept, double eps)
{
    using A = Wide<T>;
    constexpr int VEC = 16 / sizeof(T), KINDS = CENTER ? 2 : 1, SLOTS = ITEMS + ENDS;
    const int t = threadIdx.x;
    const i64 first_row = (i64)blockIdx.x * blockDim.y, step = (i64)gridDim.x * blockDim.y;
    DYNAMIC_SHARED(A, shared);
    A* mine = shared + (int)threadIdx.y * (KINDS * SLOTS * THREADS) + t;
    if constexpr (ITEMS)
#pragma unroll 4
        for (int i = 0; i < KINDS * SLOTS; ++i) mine[i * THREADS] = A(0);
    for (i64 row = first_row + threadIdx.y; row < rows; row += step) {
        const i64 at = row * length;
        const Shape<T, THREADS, ITEMS, ENDS, (JOIN || sizeof(G) > sizeof(T))> cut(x + at, length);
        const CutRow<T, THREADS, ITEMS, VEC> r(x + at, cut, shared, kept);
        const CutRow<G, THREADS, ITEMS, VEC> c(g + at, cut, r.rest(), kept);
        if constexpr (ITEMS >= 16) {
            if constexpr (JOIN) prefetch(joined + at, length);
            if (row + step < rows) {
                prefetch(x + at + step * length, length);
                prefetch(g + at + step * length, length);
            }
        }
        const Scale<A> s = row_scale<CENTER>(r, cut, length, eps);
        // Of the elements of a place: normalised, and the cotangent times the weight. This product is rounded in the sum as in the
        // difference from its mean: that of one element is zero.
        const auto pairs = [&](auto p, const auto& d) {
            return [=, v = r(p), w = parameter_at<ENDS>(weight, p)](int k) {
                return Pair<A>{(wide(v.at[k]) - s.mean) * s.inverse, product(wide(d.at[k]), wide(w.at[k]))};
            };
        };
        A along_one = A(0), along_n = A(0);
        cut.each([&](auto p) {
            const auto d = c.first(p);
            const auto pair = pairs(p, d);
#pragma unroll
            for (int k = 0; k < p.size; ++k) {
                const Pair<A> q = pair(k);
                if constexpr (ITEMS) {
                    const int slot = p.size == 1 ? ITEMS : (int)p.j * VEC + k;
                    mine[slot * THREADS] += wide(d.at[k]) * q.a;
                    if constexpr (CENTER) mine[(SLOTS + slot) * THREADS] += wide(d.at[k]);
                }
                along_one += q.b;
                along_n += q.b * q.a;
            }
        });
        const Pair<A> p = row_sums<THREADS>(along_one, along_n);
        const A one = CENTER ? p.a / A(length) : A(0), slope = p.b / A(length);
        cut.store(dx + at, [&](auto p) {
            Vector<D, p.size> more{};
            if constexpr (JOIN) more = vector_at<p.size>(joined + at + p.column);
            return [=, pair = pairs(p, c(p))](int k) {
                const A v = (pair(k).b - one - pair(k).a * slope) * s.inverse;
                if constexpr (JOIN) return plus(Wide<D>(wide(narrow<T>(v))), wide(more.at[k]));
                else return v;
            };
        });
        if (!ITEMS && t == 0) {
            out[2 * row] = s.mean;
            out[2 * row + 1] = s.inverse;
        }
    }
    if constexpr (ITEMS) {
        __syncthreads();
        for (int kind = threadIdx.y; kind < KINDS; kind += blockDim.y)
#pragma unroll 1
            for (int column = t; column < (int)length; column += THREADS) {
                A total = A(0);
                for (int y = 0; y < (int)blockDim.y; ++y) {
                    const Cut<THREADS, ITEMS, VEC, ENDS> cut(x + (first_row + y) * length, length);
                    total += shared[(y * KINDS + kind) * (SLOTS * THREADS) + cut.slot(column)];
                }
                out[((i64)blockIdx.x * KINDS + kind) * length + column] = total;
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
