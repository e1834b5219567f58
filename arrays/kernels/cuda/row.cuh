// A row that is read from memory once and used as often as need be: its threads hold it in registers (ITEMS elements each), or, where
// it is too long for that (ITEMS is 0), in shared memory as far as that goes.
#pragma once
#include "reduce.cuh"

constexpr int LONG = 512;  // threads of a block that works through a row that no registers hold

// f(j, column) for the vectors of a row that a thread has: neighbouring threads have neighbouring vectors.
template <int THREADS, int ITEMS, int VEC, class F>
__device__ inline void each_vector(i64 length, F f)
{
    static_assert(ITEMS % VEC == 0, "whole vectors");
    if constexpr (ITEMS == 0) {
        i64 j = 0;
#pragma unroll(VEC == 8 ? 2 : 4)
        for (i64 column = (i64)threadIdx.x * VEC; column < length; column += THREADS * VEC) f(j++, column);
    } else {
        const int width = (int)length;
#pragma unroll
        for (int j = 0; j < ITEMS / VEC; ++j) {
            const int column = (j * THREADS + (int)threadIdx.x) * VEC;
            if (column < width) f(j, column);
        }
    }
}

// row[column …] = f(j, column)(k) rounded, a vector at a time.
template <int THREADS, int ITEMS, int VEC, class O, class F>
__device__ inline void store_row(O* row, i64 length, F f)
{
    each_vector<THREADS, ITEMS, VEC>(length, [&](auto j, auto column) {
        Vector<O, VEC> out;
        const auto at = f(j, column);
#pragma unroll
        for (int k = 0; k < VEC; ++k) out.at[k] = narrow<O>(at(k));
        store_vector<VEC>(row + column, out);
    });
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

// The first `kept` vectors of each thread stay in shared memory once they were read (by `first`), the others are read again. Nobody
// else touches a thread's own, so that no barrier is needed.
template <class T, int VEC>
struct LongRow {
    const T* row;
    Vector<T, VEC>* slots;
    int kept;

    __device__ LongRow(const T* row, void* shared, int kept) : row(row), slots(reinterpret_cast<Vector<T, VEC>*>(shared)), kept(kept) {}

    __device__ void* rest() const { return slots + kept * LONG; }  // of the shared memory, for another row
    __device__ Vector<T, VEC> first(i64 j, i64 column) const
    {
        const Vector<T, VEC> v = vector_at<VEC>(row + column);
        if (j < kept) slots[j * LONG + (int)threadIdx.x] = v;
        return v;
    }
    __device__ Vector<T, VEC> vector(i64 j, i64 column) const
    {
        return j < kept ? slots[j * LONG + (int)threadIdx.x] : vector_at<VEC>(row + column);
    }
};

// ----- rows that begin anywhere -----------------------------------------------------------------------------------------

// N elements from a column on: the thread's j-th vector, or an element before or after the vectors.
template <int N, class I>
struct Place {
    I j, column;
};
template <int ITEMS>
struct Counter {
    using type = int;
};
template <>
struct Counter<0> {
    using type = i64;
};

// A row as vectors that the device can load, and the up to VEC - 1 elements before and after them, of which a thread has one.
template <int THREADS, int ITEMS, int VEC>
struct Cut {
    using I = typename Counter<ITEMS>::type;
    I head, whole, end;  // elements before the vectors, and in them; the column of the thread's own element, or -1

    template <class T>
    __device__ Cut(const T* row, i64 length)
    {
        static_assert(2 * (VEC - 1) <= 32, "an end for each thread at most");
        const I width = (I)length, before = (I)(0 - reinterpret_cast<u64>(row) / sizeof(T) & (VEC - 1));
        head = before < width ? before : width;
        whole = (width - head) & -(I)VEC;
        end = (I)threadIdx.x + ((I)threadIdx.x < head ? 0 : whole);
        end = end < width ? end : -1;
    }

    // f(place) for the places that a thread has.
    template <class F>
    __device__ void each(F f) const
    {
        each_vector<THREADS, ITEMS, VEC>(whole, [&](I j, I column) { f(Place<VEC, I>{j, head + column}); });
        if (end >= 0) f(Place<1, I>{0, end});
    }

    // row[place] = f(place)(k) rounded.
    template <class O, class F>
    __device__ void store(O* row, F f) const
    {
        each([&](auto p) { store_at(row, p, f(p)); });
    }
    template <class O, int N, class F>
    __device__ static void store_at(O* row, Place<N, I> p, F at)
    {
        Vector<O, N> out;
#pragma unroll
        for (int k = 0; k < N; ++k) out.at[k] = narrow<O>(at(k));
        store_vector<N>(row + p.column, out);
    }
};

template <class T, int THREADS, int ITEMS, int VEC>
struct CutRow {
    using I = int;
    Row<T, THREADS, ITEMS, VEC> whole;
    Vector<T, 1> one;

    __device__ CutRow(const T* row, const Cut<THREADS, ITEMS, VEC>& cut, void*, int)
    {
        whole.load(row + cut.head, (int)cut.whole);
        if (cut.end >= 0) one.at[0] = row[cut.end];
    }
    __device__ void* rest() const { return nullptr; }
    __device__ Vector<T, VEC> first(Place<VEC, I> p) const { return whole.v[p.j]; }
    __device__ Vector<T, VEC> operator()(Place<VEC, I> p) const { return whole.v[p.j]; }
    __device__ Vector<T, 1> first(Place<1, I>) const { return one; }
    __device__ Vector<T, 1> operator()(Place<1, I>) const { return one; }
};

template <class T, int VEC>
struct CutRow<T, LONG, 0, VEC> {
    using I = i64;
    LongRow<T, VEC> whole;

    __device__ CutRow(const T* row, const Cut<LONG, 0, VEC>&, void* shared, int kept) : whole(row, shared, kept) {}
    __device__ void* rest() const { return whole.rest(); }
    __device__ Vector<T, VEC> first(Place<VEC, I> p) const { return whole.first(p.j, p.column); }
    __device__ Vector<T, VEC> operator()(Place<VEC, I> p) const { return whole.vector(p.j, p.column); }
    __device__ Vector<T, 1> first(Place<1, I> p) const { return vector_at<1>(whole.row + p.column); }
    __device__ Vector<T, 1> operator()(Place<1, I> p) const { return vector_at<1>(whole.row + p.column); }
};
