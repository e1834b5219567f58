// Reading rows at given indices: `x` is `outer` tables of `length` rows, of which each gives the rows that `indices` name.
//
// A row is `width` vectors of N numbers, whose dtype does not matter: they are copied bit by bit.
#include "headers/types.cuh"

constexpr int THREADS = 256;
constexpr int DEEP = 4;  // vectors that a thread reads before it writes the first

// blockDim.x threads have a row, and blockDim.y rows a block. Indices count from the end where they are negative; what lies outside
// wraps around, where nobody has looked at the indices.
template <class T, int N, class I>
__global__ void __launch_bounds__(THREADS)
    gather_rows(const T* x, const I* indices, T* out, i64 outer, i64 length, i64 count, i64 width)
{
    const i64 rows = outer * count, step = (i64)gridDim.x * blockDim.y;
    const bool small = rows <= 0xffffffffLL;
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) {
        const i64 table = outer == 1 ? 0 : divided(row, count, small);
        i64 at = indices[row - table * count];
        at += at < 0 ? length : 0;
        if (at < 0 || at >= length) {
            at %= length;
            at += at < 0 ? length : 0;
        }
        const T* from = x + (table * length + at) * width * N;
        T* to = out + row * width * N;
        for (i64 first = threadIdx.x; first < width; first += DEEP * blockDim.x) {
            Vector<T, N> found[DEEP];
#pragma unroll
            for (int k = 0; k < DEEP; ++k)
                if (first + k * blockDim.x < width) found[k] = vector_at<N>(from + (first + k * blockDim.x) * N);
#pragma unroll
            for (int k = 0; k < DEEP; ++k)
                if (first + k * blockDim.x < width) store_vector<N>(to + (first + k * blockDim.x) * N, found[k]);
        }
    }
}
