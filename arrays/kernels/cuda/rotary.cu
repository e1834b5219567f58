// Pairs of elements turned by an angle: the elements k and k + half of a row, by the cosine and sine of a row of tables.
#include "headers/types.cuh"

constexpr int THREADS = 256;

// Two dimensions as one: how many there are, the length of the second, and the steps of both in an array.
struct Steps {
    i64 first, second;
    __device__ i64 at(i64 a, i64 b) const { return a * first + b * second; }
};

// Rows with a row of the tables of their own lie along `inner`; those that share one along `outer`, in a loop, so that a
// table is read once for several of them.
template <class T, class C, int VEC>
__global__ void __launch_bounds__(THREADS)
    rotary(const T* __restrict__ x, const C* __restrict__ cosines, const C* __restrict__ sines, T* __restrict__ y,
           i64 half, i64 inner, i64 inner_second, i64 outer, i64 outer_second, i64 table_1, i64 table_2, i64 x_1, i64 x_2,
           i64 x_3, i64 x_4, i64 y_1, i64 y_2, i64 y_3, i64 y_4, bool inverse)
{
    using A = Wide<T>;
    const i64 columns = half / VEC, i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= inner * columns) return;
    const i64 row = i / columns, column = (i - row * columns) * VEC;
    const i64 p = row / inner_second, q = row - p * inner_second;
    const Steps table{table_1, table_2}, x_in{x_1, x_2}, x_out{x_3, x_4}, y_in{y_1, y_2}, y_out{y_3, y_4};
    const auto c = vector_at<VEC>(cosines + table.at(p, q) + column), s = vector_at<VEC>(sines + table.at(p, q) + column);
    const T* from = x + x_in.at(p, q) + column;
    T* to = y + y_in.at(p, q) + column;
#pragma unroll 2
    for (i64 o = blockIdx.y; o < outer; o += gridDim.y) {
        const i64 u = o / outer_second, v = o - u * outer_second;
        const T* here = from + x_out.at(u, v);
        const auto a = vector_at<VEC>(here), b = vector_at<VEC>(here + half);
        Vector<T, VEC> left, right;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const A cosine = wide(c.at[k]), sine = inverse ? -wide(s.at[k]) : wide(s.at[k]);
            left.at[k] = narrow<T>(wide(a.at[k]) * cosine - wide(b.at[k]) * sine);
            right.at[k] = narrow<T>(wide(b.at[k]) * cosine + wide(a.at[k]) * sine);
        }
        store_vector(to + y_out.at(u, v), left);
        store_vector(to + y_out.at(u, v) + half, right);
    }
}
