// A row that begins anywhere in memory, and is read once and used as often as need be: its threads hold it in registers (ITEMS
// elements each), or, where it is too long for that (ITEMS is 0), in shared memory as far as that goes.
#pragma once
#include "headers/reduce.cuh"

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

    // f(place) for the places from `begin` to `end` that the thread `lane` of LANES has; their numbers j mean nothing.
    template <int LANES, class F>
    __device__ void each_between(I begin, I stop, int lane, F f) const
    {
        const I first = head + (begin > head ? (begin - head + VEC - 1) & -(I)VEC : 0), last = head + ((stop - head) & -(I)VEC);
        if (first >= last)
            for (I c = begin + lane; c < stop; c += LANES) f(Place<1, I>{0, c});
        else {
#pragma unroll(2)
            for (I c = first + lane * VEC; c < last; c += LANES * VEC) f(Place<VEC, I>{0, c});
            if (begin + lane < first) f(Place<1, I>{0, begin + lane});
            if (last + lane < stop) f(Place<1, I>{0, last + lane});
        }
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
template <class T, int THREADS, int VEC, class S>
struct CutRow<T, THREADS, 0, VEC, S> {
    using I = i64;
    S source;
    Vector<T, VEC>* slots;
    int kept;

    template <class C>
    __device__ CutRow(const S& source, const C&, void* shared, int kept) : source(source), slots(reinterpret_cast<Vector<T, VEC>*>(shared)), kept(kept) {}

    __device__ void* rest() const { return slots + kept * THREADS; }  // of the shared memory, for another row
    __device__ Vector<T, VEC> first(Place<VEC, I> p) const
    {
        const Vector<T, VEC> v = source.first(p);
        if (p.j < kept) slots[p.j * THREADS + (int)threadIdx.x] = v;
        return v;
    }
    __device__ Vector<T, VEC> operator()(Place<VEC, I> p) const
    {
        return p.j < kept ? slots[p.j * THREADS + (int)threadIdx.x] : source.again(p);
    }
    __device__ Vector<T, 1> first(Place<1, I> p) const { return source.first(p); }
    __device__ Vector<T, 1> operator()(Place<1, I> p) const { return source.again(p); }

    // A place that other threads may have read, before a barrier: the slots are the row from its first vector on.
    template <int N, class C>
    __device__ Vector<T, N> any(Place<N, I> p, const C& cut) const
    {
        const i64 at = p.column - cut.head, here = (i64)kept * (THREADS * VEC);
        if (at < 0 || at + N > (here < cut.whole ? here : cut.whole)) return source.again(p);
        return vector_at<N>(reinterpret_cast<const T*>(slots) + at);
    }
};

// ----- statistics -------------------------------------------------------------------------------------------------------

template <class A>
struct Scale {
    A mean, inverse;
};

// How a row is cut by a kernel that reads MORE than it and a parameter like it: half as deep, for want of registers.
template <class T, int THREADS, int ITEMS, bool ENDS, bool MORE>
using Shape = Cut<THREADS, ITEMS, 16 / sizeof(T), ENDS, (sizeof(T) == 2 ? 2 : 4) / (ENDS || MORE ? 2 : 1)>;

// Statistics of a row: two passes over registers, as exact as it gets; one pass over a row that is longer.
template <bool CENTER, class T, int THREADS, int ITEMS, int VEC, class S, bool ENDS, int DEEP>
__device__ inline Scale<Wide<T>> row_scale(const CutRow<T, THREADS, ITEMS, VEC, S>& x,
                                           const Cut<THREADS, ITEMS, VEC, ENDS, DEEP>& cut, i64 length, double eps)
{
    using A = Wide<T>;
    if constexpr (ITEMS == 0 && CENTER) {
        constexpr int EACH = 8 / VEC < 2 ? 2 : 8 / VEC;  // vectors at a time
        Moments<A> m = Moments<A>::none();
        i64 i = 0;
        for (i64 start = (i64)threadIdx.x * VEC; start < cut.whole; start += THREADS * VEC * EACH, i += EACH) {
            A v[EACH * VEC];
            int count = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const i64 at = start + j * THREADS * VEC;
                Vector<T, VEC> found;
                if (at < cut.whole) found = x.first(Place<VEC, i64>{i + j, cut.head + at});
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[j * VEC + k] = at < cut.whole ? wide(found.at[k]) : A(0);
                count += at < cut.whole ? VEC : 0;
            }
            m.add(v, count);
        }
        if constexpr (ENDS)
            if (cut.end >= 0) m.merge(Moments<A>{A(1), wide(x.first(Place<1, i64>{0, cut.end}).at[0]), A(0)});
        m = row_moments<THREADS>(m);
        return Scale<A>{m.mean, A(1) / sqrt(m.m2 / A(length) + A(eps))};
    } else {
        A s = A(0), d = A(0);
        if constexpr (!CENTER) {
            cut.each([&](auto p) { each_of(x.first(p), [&](A v) { s += v * v; }); });
            return Scale<A>{A(0), A(1) / sqrt(row_sum<THREADS>(s) / A(length) + A(eps))};
        }
        cut.each([&](auto p) { each_of(x(p), [&](A v) { s += v; }); });
        const A mean = row_sum<THREADS>(s) / A(length);
        s = A(0);
        cut.each([&](auto p) { each_of(x.first(p), [&](A v) { d += v - mean, s += (v - mean) * (v - mean); }); });
        // Deviations from a rounded mean do not add up to zero: equal numbers, times 1 / sqrt(eps), would be far from it.
        const Pair<A> sums = row_sums<THREADS>(d, s);
        const A left = sums.a / A(length), square = sums.b / A(length) - left * left;
        return Scale<A>{mean + left, A(1) / sqrt((square < A(0) ? A(0) : square) + A(eps))};
    }
}
