// A row held in the registers of the threads that share it: read from memory once, used as often as need be.
#pragma once
#include "reduce.cuh"

template <int VEC, class T>
__device__ inline Vector<T, VEC> vector_at(const T* p)
{
    return *reinterpret_cast<const Vector<T, VEC>*>(p);
}

template <int VEC, class T>
__device__ inline void store_vector(T* p, const Vector<T, VEC>& v)
{
    *reinterpret_cast<Vector<T, VEC>*>(p) = v;
}

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
