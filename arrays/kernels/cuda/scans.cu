// Running sums and products; and the places of the true elements of a mask, in order: each block counts its share, and after the
// counts have been summed up writes the places of it.
#include "headers/reduce.cuh"

struct Multiply {
    template <class A>
    __device__ static A of(A a, A b)
    {
        return a * b;
    }
    static constexpr int identity = 1;
};
struct Sum : Add {
    static constexpr int identity = 0;
};
// Sums of integers wrap, which those of signed ones may not.
template <class O>
struct Held {
    using type = Wide<O>;
};
template <>
struct Held<i64> {
    using type = u64;
};

// Of integers, beside the floats of the headers.
template <class T>
__device__ inline T wide(T x)
{
    return x;
}

// What changes nothing, a zero with a sign either: the sum of no negative zero and one is positive.
template <class Op, class A>
__device__ inline A nothing()
{
    const A identity = A(Op::identity);
    return A(0.5) != A(0) && !Op::identity ? -identity : identity;
}

// The reduction of each element of a row and those before it, rounded once. THREADS have a row (256 one a block, 32 one a warp),
// VEC elements side by side each at a time, which are read and written together where `vectors` says that they may.
template <class Op, class T, class O, int THREADS, int VEC>
__global__ void __launch_bounds__(256) running_rows(const T* x, O* out, i64 rows, i64 length, bool vectors)
{
    using A = typename Held<O>::type;
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += (i64)gridDim.x * blockDim.y) {
        const T* const from = x + row * length;
        O* const to = out + row * length;
        A carry = nothing<Op, A>();
        for (i64 start = 0; start < length; start += THREADS * VEC) {
            const i64 at = start + (i64)threadIdx.x * VEC;
            const int count = (int)(length - at < VEC ? length - at : VEC);
            A held[VEC];
            if (vectors && count == VEC) {
                const Vector<T, VEC> v = vector_at<VEC>(from + at);
#pragma unroll
                for (int k = 0; k < VEC; ++k) held[k] = (A)wide(v.at[k]);
            } else
#pragma unroll
                for (int k = 0; k < VEC; ++k) held[k] = k < count ? (A)wide(from[at + k]) : nothing<Op, A>();
#pragma unroll
            for (int k = 1; k < VEC; ++k) held[k] = Op::of(held[k - 1], held[k]);
            const Pair<A> sums = row_scan<Op, THREADS>(held[VEC - 1], nothing<Op, A>());
            const A before = Op::of(carry, sums.a);
            carry = Op::of(carry, sums.b);
            Vector<O, VEC> result;
#pragma unroll
            for (int k = 0; k < VEC; ++k) result.at[k] = narrow<O>(Op::of(before, held[k]));
            if (vectors && count == VEC)
                store_vector<VEC>(to + at, result);
            else
#pragma unroll
                for (int k = 0; k < VEC; ++k)
                    if (k < count) to[at + k] = result.at[k];
        }
    }
}

// The same down the columns of matrices (length, width) that follow each other. A block has 32 * VEC columns, and takes ROWS rows
// with each of its eight warps at a time.
template <class Op, class T, class O, int VEC>
__global__ void __launch_bounds__(256) running_columns(const T* x, O* out, i64 length, i64 width)
{
    using A = typename Held<O>::type;
    constexpr int WARPS = 8, ROWS = 8;
    SHARED(A, totals, WARPS * VEC * 32);
    const i64 column = ((i64)blockIdx.x * 32 + threadIdx.x) * VEC, matrix = (i64)blockIdx.y * length * width;
    const bool mine = column < width;
    A carry[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) carry[k] = nothing<Op, A>();
    for (i64 start = 0; start < length; start += WARPS * ROWS) {
        const i64 first = start + threadIdx.y * ROWS;
        A held[ROWS][VEC];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Vector<T, VEC> v;
            const bool there = mine && first + r < length;
            if (there) v = vector_at<VEC>(x + matrix + (first + r) * width + column);
#pragma unroll
            for (int k = 0; k < VEC; ++k) held[r][k] = there ? (A)wide(v.at[k]) : nothing<Op, A>();
        }
#pragma unroll
        for (int r = 1; r < ROWS; ++r)
#pragma unroll
            for (int k = 0; k < VEC; ++k) held[r][k] = Op::of(held[r - 1][k], held[r][k]);
        __syncthreads();  // the totals may still be read for the rows before
#pragma unroll
        for (int k = 0; k < VEC; ++k) totals[(threadIdx.y * VEC + k) * 32 + threadIdx.x] = held[ROWS - 1][k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            A before = carry[k];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w == threadIdx.y) before = carry[k];
                carry[k] = Op::of(carry[k], totals[(w * VEC + k) * 32 + threadIdx.x]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) held[r][k] = Op::of(before, held[r][k]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (!mine || first + r >= length) continue;
            Vector<O, VEC> result;
#pragma unroll
            for (int k = 0; k < VEC; ++k) result.at[k] = narrow<O>(held[r][k]);
            store_vector<VEC>(out + matrix + (first + r) * width + column, result);
        }
    }
}

constexpr int THREADS = 256;
constexpr int EACH = 16;  // elements of a thread, side by side

__device__ inline u32 truths(const bool* mask, i64 start, i64 size)
{
    u32 bits = 0;
    if (start + EACH <= size && is_aligned<EACH>(mask + start)) {
        const auto all = vector_at<EACH>(mask + start);
#pragma unroll
        for (int k = 0; k < EACH; ++k) bits |= (u32)all.at[k] << k;
        return bits;
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) bits |= (u32)(start + k < size && mask[start + k]) << k;
    return bits;
}

__global__ void __launch_bounds__(THREADS) count_true(const bool* mask, i64* counts, i64 size)
{
    const i64 start = ((i64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    const int n = row_sum<THREADS>(__popc(truths(mask, start, size)));
    if (threadIdx.x == 0) counts[blockIdx.x] = n;
}

// `ends[b]` is how many are true in blocks 0 … b.
__global__ void __launch_bounds__(THREADS) write_true(const bool* mask, const i64* ends, i64* places, i64 size)
{
    const i64 start = ((i64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    const u32 bits = truths(mask, start, size);
    i64 at = (blockIdx.x ? ends[blockIdx.x - 1] : 0) + prefix_sum<THREADS>(__popc(bits)).a;
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (bits >> k & 1u) places[at++] = start + k;
}
