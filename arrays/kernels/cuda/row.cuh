// A row that begins anywhere in memory, and is read once and used as often as need be: its threads hold it in registers (ITEMS
// elements each), or, where it is too long for that (ITEMS is 0), in shared memory as far as that goes.
#pragma once
#include "reduce.cuh"

constexpr int LONG = 512;  // threads of a block that works through a row that no registers hold

// N elements from a column on: the thread's j-th vector, or an element before or after the vectors.
template <int N, class I>
struct Place {
    I j, column;
    static constexpr int size = N;
};
template <int ITEMS>
struct Counter {
    using type = int;
};
template <>
struct Counter<0> {
    using type = i64;
};

// A row as vectors that the device can load, and (ENDS) the up to VEC - 1 elements before and after them, of which a thread has one.
// Of long rows DEEP vectors are worked on at a time.
template <int THREADS, int ITEMS, int VEC, bool ENDS = true, int DEEP = VEC == 8 ? 2 : 4>
struct Cut {
    using I = typename Counter<ITEMS>::type;
    I head, whole, end;  // elements before the vectors, and in them; the column of the thread's own element, or -1

    template <class T>
    __device__ Cut(const T* row, i64 length)
    {
        static_assert(ITEMS % VEC == 0, "whole vectors");
        static_assert(2 * (VEC - 1) <= 32, "an end for each thread at most");
        const I width = (I)length, before = ENDS ? (I)(0 - reinterpret_cast<u64>(row) / sizeof(T) & (VEC - 1)) : 0;
        head = before < width ? before : width;
        whole = ENDS ? (width - head) & -(I)VEC : width;
        end = (I)threadIdx.x + ((I)threadIdx.x < head ? 0 : whole);
        end = ENDS && end < width ? end : -1;
    }

    // f(place) for the places that a thread has: neighbouring threads have neighbouring vectors.
    template <class F>
    __device__ void each(F f) const
    {
        if constexpr (ITEMS == 0) {
            i64 j = 0;
#pragma unroll(DEEP)
            for (i64 column = (i64)threadIdx.x * VEC; column < whole; column += THREADS * VEC) f(Place<VEC, I>{j++, head + column});
        } else
#pragma unroll
            for (int j = 0; j < ITEMS / VEC; ++j) {
                const int column = (j * THREADS + (int)threadIdx.x) * VEC;
                if (column < whole) f(Place<VEC, I>{j, head + column});
            }
        if constexpr (ENDS)
            if (end >= 0) f(Place<1, I>{0, end});
    }

    // Which of the elements of all threads a column is, where a thread's vectors come before its end, and its elements lie THREADS apart.
    __device__ int slot(int column) const
    {
        const int at = column - (int)head, vector = at / VEC;
        if (at < 0 || at >= (int)whole) return ITEMS * THREADS + (at < 0 ? column : at - (int)whole + (int)head);
        return (vector / THREADS * VEC + at % VEC) * THREADS + vector % THREADS;
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

// f(element) for those of a vector.
template <class T, int N, class F>
__device__ inline void each_of(const Vector<T, N>& v, F f)
{
#pragma unroll
    for (int k = 0; k < N; ++k) f(wide(v.at[k]));
}

// A row in memory.
template <class T>
struct Plain {
    const T* row;
    __device__ Plain(const T* row) : row(row) {}
    template <int N, class I>
    __device__ Vector<T, N> first(Place<N, I> p) const { return vector_at<N>(row + p.column); }
    template <int N, class I>
    __device__ Vector<T, N> again(Place<N, I> p) const { return first(p); }
};

// The sum of two rows, rounded; it is written to memory when it is first asked for.
template <class T>
struct Total {
    const T *row, *residual;
    T* total;
    template <int N, class I>
    __device__ Vector<T, N> first(Place<N, I> p) const
    {
        Vector<T, N> v = vector_at<N>(row + p.column);
        const Vector<T, N> r = vector_at<N>(residual + p.column);
#pragma unroll
        for (int k = 0; k < N; ++k) v.at[k] = narrow<T>(wide(v.at[k]) + wide(r.at[k]));
        store_vector<N>(total + p.column, v);
        return v;
    }
    template <int N, class I>
    __device__ Vector<T, N> again(Place<N, I> p) const { return vector_at<N>(total + p.column); }
};

// A row that its threads hold, each what it has itself: no barrier is needed.
template <class T, int THREADS, int ITEMS, int VEC, class S = Plain<T>>
struct CutRow {
    using I = int;
    Vector<T, VEC> v[ITEMS / VEC];
    Vector<T, 1> one;

    template <class C>
    __device__ CutRow(const S& source, const C& cut, void*, int)
    {
        cut.each([&](auto p) { keep(p, source.first(p)); });
    }
    __device__ void keep(Place<VEC, I> p, const Vector<T, VEC>& found) { v[p.j] = found; }
    __device__ void keep(Place<1, I>, const Vector<T, 1>& found) { one = found; }
    __device__ void* rest() const { return nullptr; }
    __device__ Vector<T, VEC> operator()(Place<VEC, I> p) const { return v[p.j]; }
    __device__ Vector<T, 1> operator()(Place<1, I>) const { return one; }
    template <class P>
    __device__ auto first(P p) const { return (*this)(p); }
};

// The first `kept` vectors of each thread stay in shared memory once they were read (by `first`), the rest is read again.
template <class T, int VEC, class S>
struct CutRow<T, LONG, 0, VEC, S> {
    using I = i64;
    S source;
    Vector<T, VEC>* slots;
    int kept;

    template <class C>
    __device__ CutRow(const S& source, const C&, void* shared, int kept) : source(source), slots(reinterpret_cast<Vector<T, VEC>*>(shared)), kept(kept) {}

    __device__ void* rest() const { return slots + kept * LONG; }  // of the shared memory, for another row
    __device__ Vector<T, VEC> first(Place<VEC, I> p) const
    {
        const Vector<T, VEC> v = source.first(p);
        if (p.j < kept) slots[p.j * LONG + (int)threadIdx.x] = v;
        return v;
    }
    __device__ Vector<T, VEC> operator()(Place<VEC, I> p) const
    {
        return p.j < kept ? slots[p.j * LONG + (int)threadIdx.x] : source.again(p);
    }
    __device__ Vector<T, 1> first(Place<1, I> p) const { return source.first(p); }
    __device__ Vector<T, 1> operator()(Place<1, I> p) const { return source.again(p); }
};
