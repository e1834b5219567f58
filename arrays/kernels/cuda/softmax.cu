// softmax and log_softmax along contiguous rows, and the cross-entropy of integer labels, forward and backward.
//
// What a row is shifted by is its maximum, or nothing where that is not finite: exactly what the CPU does.
#include "headers/row.cuh"

template <class A>
__device__ inline A shift_of(A maximum)
{
    return maximum - maximum == A(0) ? maximum : A(0);
}

// The maximum and the sum of exp(x - shift) of a part of a row, found in one pass.
template <class A>
struct Exponentials {
    A maximum, total;

    __device__ static Exponentials none() { return Exponentials{-infinity<A>(), A(0)}; }

    __device__ void rescale(A larger)
    {
        // Nothing stays nothing: the factor may be infinite.
        if (total != A(0)) total *= exp(shift_of(maximum) - shift_of(larger));
        maximum = larger;
    }
    __device__ void merge(Exponentials o)
    {
        const A larger = Max::of(maximum, o.maximum);
        rescale(larger);
        o.rescale(larger);
        total += o.total;
    }
    template <class V>
    __device__ void add(const V& x)
    {
        A m = maximum;
        each_of(x, [&](A v) { m = Max::of(m, v); });
        rescale(m);
        const A s = shift_of(m);
        each_of(x, [&](A v) { total += exp(v - s); });
    }
};

template <class A>
__device__ inline Exponentials<A> warp_exponentials(Exponentials<A> v)
{
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        Exponentials<A> u;
        u.maximum = __shfl_xor_sync(WHOLE_WARP, v.maximum, o);
        u.total = __shfl_xor_sync(WHOLE_WARP, v.total, o);
        v.merge(u);
    }
    return v;
}

template <int THREADS, class A>
__device__ inline Exponentials<A> block_exponentials(Exponentials<A> v)
{
    v = warp_exponentials(v);
    SHARED(Exponentials<A>, slots, THREADS / 32);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) slots[warp] = v;
    __syncthreads();
    return warp_exponentials(lane < THREADS / 32 ? slots[lane] : Exponentials<A>::none());
}

// The shift of a row, and the sum of its exponentials: the maximum first where registers hold the row, both in one pass where it is longer.
template <class T, int THREADS, int ITEMS, int VEC>
__device__ inline Exponentials<Wide<T>> row_exponentials(const CutRow<T, THREADS, ITEMS, VEC>& x, const Cut<THREADS, ITEMS, VEC>& cut)
{
    using A = Wide<T>;
    if constexpr (ITEMS == 0) {
        Exponentials<A> e = Exponentials<A>::none();
        cut.each([&](auto p) { e.add(x.first(p)); });
        e = block_exponentials<THREADS>(e);
        return Exponentials<A>{shift_of(e.maximum), e.total};
    } else {
        A m = -infinity<A>(), s = A(0);
        cut.each([&](auto p) { each_of(x(p), [&](A v) { m = Max::of(m, v); }); });
        const A shift = shift_of(row_reduce<Max, THREADS>(m, -infinity<A>()));
        cut.each([&](auto p) { each_of(x(p), [&](A v) { s += exp(v - shift); }); });
        return Exponentials<A>{shift, row_sum<THREADS>(s)};
    }
}

// ----- softmax --------------------------------------------------------------------------------------------------------

template <bool LOG, class A>
__device__ inline A weight_of(A x, A shift, A scale)
{
    return LOG ? (x - shift) - scale : exp(x - shift) * scale;
}
// What weight_of scales by. A row of which nothing is left is zero where it was masked.
template <bool LOG, class A>
__device__ inline A scale_of(A total, bool masked)
{
    if (masked && total == A(0)) total = A(1);
    return LOG ? log(total) : A(1) / total;
}

template <bool LOG, class T, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(T) == 8 ? 1 : 2)
    softmax_forward(const T* x, T* y, Wide<T>* shifts, Wide<T>* totals, i64 rows, i64 length, int kept, bool masked)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const Cut<THREADS, ITEMS, VEC> cut(x + row * length, length);
        const CutRow<T, THREADS, ITEMS, VEC> r(x + row * length, cut, shared, kept);
        const Exponentials<A> e = row_exponentials(r, cut);
        const A scale = scale_of<LOG>(e.total, masked);
        if (!LOG && shifts && threadIdx.x == 0) shifts[row] = e.maximum, totals[row] = masked && e.total == A(0) ? A(1) : e.total;
        cut.store(y + row * length, [&](auto p) {
            return [=, v = r(p)](int k) { return weight_of<LOG>(wide(v.at[k]), e.maximum, scale); };
        });
    }
}

template <bool LOG, class T, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(T) == 8 || sizeof(T) * ITEMS >= 128 ? 1 : 2)  // two rows
    softmax_backward(const T* g, const T* y, T* dx, i64 rows, i64 length, int kept)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const Cut<THREADS, ITEMS, VEC> cut(y + row * length, length);
        const CutRow<T, THREADS, ITEMS, VEC> c(g + row * length, cut, shared, kept), r(y + row * length, cut, c.rest(), kept);
        A s = A(0);
        cut.each([&](auto p) {
            const auto cs = c.first(p), rs = r.first(p);
#pragma unroll
            for (int k = 0; k < (int)(sizeof(cs) / sizeof(T)); ++k) s += LOG ? wide(cs.at[k]) : wide(cs.at[k]) * wide(rs.at[k]);
        });
        s = row_sum<THREADS>(s);
        cut.store(dx + row * length, [&](auto p) {
            return [=, cs = c(p), rs = r(p)](int k) {
                const A ck = wide(cs.at[k]), rk = wide(rs.at[k]);
                return LOG ? ck - exp(rk) * s : rk * (ck - s);
            };
        });
    }
}

// ----- cross-entropy --------------------------------------------------------------------------------------------------

struct Label {
    i64 at;
    bool ignored, valid;
};

__device__ inline Label label_of(const i64* labels, i64 row, i64 classes, bool has_ignored, i64 ignored)
{
    const i64 at = labels[row];
    const bool skip = has_ignored && at == ignored;
    return Label{at, skip, !skip && at >= 0 && at < classes};
}

template <class A>
__device__ inline A quiet_nan()
{
    return infinity<A>() - infinity<A>();
}

// The loss of a row from its logits' shift, their sum less the shift each, and the sum of their exponentials.
template <class A>
__device__ inline A loss_of(const Label& label, A at_label, A sum, A total, i64 classes, A smoothing)
{
    if (label.ignored) return A(0);
    if (!label.valid) return quiet_nan<A>();
    A loss = log(total) - (A(1) - smoothing) * at_label;
    if (smoothing != A(0)) loss -= smoothing * (sum / A(classes));
    return loss;
}

template <class T, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(T) == 8 ? 1 : 2)
    cross_entropy_forward(const T* x, const i64* labels, Wide<T>* losses, Wide<T>* shifts, Wide<T>* totals, i64 rows, i64 length, int kept,
                          bool has_ignored, i64 ignored, double smoothing)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const Cut<THREADS, ITEMS, VEC> cut(x + row * length, length);
        const CutRow<T, THREADS, ITEMS, VEC> r(x + row * length, cut, shared, kept);
        const Label label = label_of(labels, row, length, has_ignored, ignored);
        const Exponentials<A> e = row_exponentials(r, cut);
        A sum = A(0);
        if (smoothing != 0) {
            cut.each([&](auto p) { each_of(r(p), [&](A v) { sum += v - e.maximum; }); });
            sum = row_sum<THREADS>(sum);
        }
        if (threadIdx.x == 0) {
            const A at_label = label.valid ? wide(x[row * length + label.at]) - e.maximum : A(0);
            losses[row] = loss_of(label, at_label, sum, e.total, length, A(smoothing));
            shifts[row] = label.valid ? e.maximum : A(0);
            totals[row] = label.valid ? e.total : A(1);
        }
    }
}

template <class A>
__device__ inline A slope_of(A d, bool here, A scale, i64 classes, A smoothing)
{
    if (here) d -= (A(1) - smoothing) * scale;
    return smoothing != A(0) ? d - smoothing / A(classes) * scale : d;
}

// The softmax is computed again: cheaper than writing it in the forward pass and reading it back. What does not count is zero by selection, so that a NaN in it goes nowhere.
// The logits are those of `length` classes from `first` on, or of all; slopes may be shorter floats than they are.
template <class O, class T, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(T) == 8 ? 1 : 2)
    cross_entropy_backward(const Wide<T>* g, const Wide<T>* shifts, const Wide<T>* totals, const T* x, const i64* labels, O* dx, i64 rows,
                           i64 length, int kept, i64 first, i64 classes, bool has_ignored, i64 ignored, double smoothing)
{
    using A = Wide<T>;
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const Cut<THREADS, ITEMS, VEC> cut(x + row * length, length);
        const CutRow<T, THREADS, ITEMS, VEC> r(x + row * length, cut, shared, kept);  // first: so fewest registers are held
        const Label label = label_of(labels, row, classes, has_ignored, ignored);
        const A scale = g[row], shift = shifts[row], factor = scale / totals[row];
        cut.store(dx + row * length, [&](auto p) {
            return [=, v = r(p), here = decltype(p.column)(label.at - first) - p.column](int k) {
                const A p = exp(wide(v.at[k]) - shift) * factor;
                return label.valid ? slope_of(p, k == here, scale, classes, A(smoothing)) : A(0);
            };
        });
    }
}

// ----- cross-entropy of logits that are there in tiles of classes ---------------------------------------------------------

// Of each row of a tile, whose classes begin at `first`: the shift, the sum of the exponentials, the sum of the logits less the shift each (where there are
// `sums`), and the logit of the label where the tile has it.
template <class A, int THREADS, int ITEMS, int VEC>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, sizeof(A) == 8 ? 1 : 2)
    cross_entropy_tile(const A* x, const i64* labels, A* shifts, A* totals, A* sums, A* picked, i64 rows, i64 length, int kept, i64 first)
{
    DYNAMIC_SHARED(char, shared);
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const Cut<THREADS, ITEMS, VEC> cut(x + row * length, length);
        const CutRow<A, THREADS, ITEMS, VEC> r(x + row * length, cut, shared, kept);
        const Exponentials<A> e = row_exponentials(r, cut);
        A sum = A(0);
        if (sums) {
            cut.each([&](auto p) { each_of(r(p), [&](A v) { sum += v - e.maximum; }); });
            sum = row_sum<THREADS>(sum);
        }
        if (threadIdx.x == 0) {
            const i64 at = labels[row];
            if (at >= first && at - first < length) picked[row] = x[row * length + at - first];
            shifts[row] = e.maximum, totals[row] = e.total;
            if (sums) sums[row] = sum;
        }
    }
}

// The loss of each row, its shift and its total, from those of its tiles of `width` classes (the last one has what is left).
template <class A>
__global__ void __launch_bounds__(128)
    cross_entropy_of_tiles(const A* tile_shifts, const A* tile_totals, const A* tile_sums, const A* picked, const i64* labels, A* losses, A* shifts, A* totals,
                           i64 rows, i64 width, i64 classes, bool has_ignored, i64 ignored, double smoothing)
{
    for (i64 row = (i64)blockIdx.x * 128 + threadIdx.x; row < rows; row += (i64)gridDim.x * 128) {
        const Label label = label_of(labels, row, classes, has_ignored, ignored);
        Exponentials<A> e = Exponentials<A>::none();
        for (i64 first = 0, i = row; first < classes; first += width, i += rows) {
            const A total = tile_totals[i];  // it is nothing or infinite where the largest logit is
            e.merge(Exponentials<A>{total == A(0) ? -infinity<A>() : total == infinity<A>() ? total : tile_shifts[i], total});
        }
        const A shift = shift_of(e.maximum);
        A sum = A(0);
        if (smoothing != 0)
            for (i64 first = 0, i = row; first < classes; first += width, i += rows)
                sum += tile_sums[i] + (tile_shifts[i] - shift) * A(width < classes - first ? width : classes - first);
        losses[row] = loss_of(label, label.valid ? picked[row] - shift : A(0), sum, e.total, classes, A(smoothing));
        shifts[row] = label.valid ? shift : A(0);
        totals[row] = label.valid ? e.total : A(1);
    }
}
