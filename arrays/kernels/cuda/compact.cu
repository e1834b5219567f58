// The places of the true elements of a mask, in order: each block counts its share, and after the counts have been summed up
// writes the places of it.
#include "headers/reduce.cuh"

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
