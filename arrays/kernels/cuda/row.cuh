// A row held in the registers of the threads that share it: read from memory once, used as often as need be.
#pragma once
#include "reduce.cuh"

// f(j, column) for the vectors of a row that a thread has: neighbouring threads have neighbouring vectors.
template <int THREADS, int ITEMS, int VEC, class F>
__device__ inline void each_vector(int width, F f)
{
    static_assert(ITEMS % VEC == 0, "whole vectors");
#pragma unroll
    for (int j = 0; j < ITEMS / VEC; ++j) {
        const int column = (j * THREADS + (int)threadIdx.x) * VEC;
        if (column < width) f(j, column);
    }
}

template <class T, int THREADS, int ITEMS, int VEC>
struct Row {
    Vector<T, VEC> v[ITEMS / VEC];

    __device__ void load(const T* row, int width)
    {
        each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int column) { v[j] = vector_at<VEC>(row + column); });
    }

    __device__ Wide<T> at(int j, int k) const { return wide(v[j].at[k]); }

    // f(element) for the elements that the row has.
    template <class F>
    __device__ void each(int width, F f) const
    {
        each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int) {
#pragma unroll
            for (int k = 0; k < VEC; ++k) f(at(j, k));
        });
    }
};

constexpr int LONG = 512;  // threads of a block that works through a row that no registers hold

// f(column) for the vectors of such a row that a thread has.
template <int VEC, class F>
__device__ inline void each_long(i64 length, F f)
{
#pragma unroll 4
    for (i64 column = (i64)threadIdx.x * VEC; column < length; column += LONG * VEC) f(column);
}

// row[column …] = f(k, column) rounded, a vector at a time, of such a row.
template <int VEC, class O, class F>
__device__ inline void store_long(O* row, i64 length, F f)
{
    each_long<VEC>(length, [&](i64 column) {
        Vector<O, VEC> out;
        const auto at = f(column);
#pragma unroll
        for (int k = 0; k < VEC; ++k) out.at[k] = narrow<O>(at(k));
        store_vector<VEC>(row + column, out);
    });
}

// row[column …] = f(j, k, column) rounded, a vector at a time.
template <class O, int THREADS, int ITEMS, int VEC, class F>
__device__ inline void store_row(O* row, int width, F f)
{
    each_vector<THREADS, ITEMS, VEC>(width, [&](int j, int column) {
        Vector<O, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; ++k) out.at[k] = narrow<O>(f(j, k, column));
        store_vector<VEC>(row + column, out);
    });
}
