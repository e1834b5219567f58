// The second stage of every sum over rows: a few partial rows become one, always in the same order.
#include "headers/types.cuh"

// out[column] = sum of partial[part][column]; blocks of 32 columns by 32 parts.
template <class A, class O>
__global__ void __launch_bounds__(1024) sum_parts(const A* partial, O* out, i64 parts, i64 width)
{
    SHARED(A, tile, 32 * 33);
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
    A s = A(0);
    if (column < width)
#pragma unroll 4
        for (i64 p = threadIdx.y; p < parts; p += 32) s += partial[p * width + column];
    tile[threadIdx.y * 33 + threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        A total = A(0);
        for (int y = 0; y < 32; ++y) total += tile[y * 33 + threadIdx.x];
        out[column] = narrow<O>(total);
    }
}
