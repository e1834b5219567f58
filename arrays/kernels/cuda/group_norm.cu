// group_norm, and instance_norm as groups of one channel: a block for each group of each sample.
//
// A group is read again for every step, from the second-level cache as long as the groups at work fit there. LAST says whether
// the channels are the last dimension (NHWC) or the second (NCHW), where a group lies without gaps.
#include "row.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// A thread's walk over the vectors of a group: `outer` and `inner` count without a division for each.
struct Walk {
    i64 outer, inner, length, step_outer, step_inner;

    __device__ Walk(i64 length) : length(length)
    {
        // Divisions of 32 bits: both dividends are small.
        const u32 by = length > THREADS ? THREADS + 1 : (u32)length;
        outer = threadIdx.x / by;
        inner = threadIdx.x % by;
        step_outer = THREADS / by;
        step_inner = THREADS % by;
    }
    __device__ void next()
    {
        outer += step_outer;
        inner += step_inner;
        if (inner >= length) {
            inner -= length;
            ++outer;
        }
    }
};

struct Group {
    i64 sample, base, first_channel;  // which it belongs to, where it starts, and its first channel
    i64 channels, inside, spatial;    // channels of an array, of a group; positions of a channel
    __device__ i64 size() const { return inside * spatial; }
};

__device__ inline Group group_of(i64 index, i64 groups, i64 inside, i64 spatial, bool last)
{
    const i64 channels = groups * inside, sample = index / groups, first = (index - sample * groups) * inside;
    const i64 base = sample * channels * spatial + (last ? first : first * spatial);
    return Group{sample, base, first, channels, inside, spatial};
}

// f(offset from the group's base, channel within the group) for each vector of the group.
template <bool LAST, int VEC, class F>
__device__ inline void walk(const Group& g, F f)
{
    Walk w(LAST ? g.inside : g.spatial / VEC);
    const i64 vectors = g.size() / VEC;
#pragma unroll 2
    for (i64 e = threadIdx.x; e < vectors; e += THREADS, w.next())
        if (LAST)
            f(w.outer * g.channels + w.inner, w.inner);
        else
            f(e * VEC, w.outer);
}

template <class A>
struct Scale {
    A mean, inverse;
};

template <bool LAST, int VEC, class T>
__device__ inline Scale<Wide<T>> group_scale(const T* x, const Group& g, double eps)
{
    using A = Wide<T>;
    Moments<A> m = Moments<A>::none();
    if constexpr (VEC > 1) {
        walk<LAST, VEC>(g, [&](i64 at, i64) {
            const Vector<T, VEC> v = vector_at<VEC>(x + at);
            A a[VEC];
#pragma unroll
            for (int k = 0; k < VEC; ++k) a[k] = wide(v.at[k]);
            m.add(a, VEC);
        });
    } else {
        // Eight numbers a merge, which divides.
        A a[8];
        int count = 0;
        Walk w(LAST ? g.inside : g.spatial);
        for (i64 e = threadIdx.x; e < g.size();) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                a[k] = A(0);
                if (e < g.size()) {
                    a[k] = wide(x[LAST ? w.outer * g.channels + w.inner : e]);
                    count = k + 1;
                }
                e += THREADS;
                w.next();
            }
            m.add(a, count);
        }
    }
    m = row_moments<THREADS>(m);
    return Scale<A>{m.mean, A(1) / sqrt(m.m2 / A(g.size()) + A(eps))};
}

template <bool LAST, class T, class G, class W, int VEC>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : LAST ? 2 : 3) group_norm_forward(const T* x, const W* weight, const W* bias, G* y,
                                                                i64 samples, i64 groups, i64 inside, i64 spatial,
                                                                double eps)
{
    using A = Wide<T>;
    for (i64 index = blockIdx.x; index < samples * groups; index += gridDim.x) {
        const Group g = group_of(index, groups, inside, spatial, LAST);
        const Scale<A> s = group_scale<LAST, VEC>(x + g.base, g, eps);
        walk<LAST, VEC>(g, [&](i64 at, i64 c) {
            const Vector<T, VEC> v = vector_at<VEC>(x + g.base + at);
            const A w = wide(weight[g.first_channel + c]), b = wide(bias[g.first_channel + c]);
            Vector<G, VEC> out;
#pragma unroll
            for (int k = 0; k < VEC; ++k) out.at[k] = narrow<G>((wide(v.at[k]) - s.mean) * s.inverse * w + b);
            store_vector<VEC>(y + g.base + at, out);
        });
    }
}

// dx, and partial[sample][which][channel] of what weight and bias get.
template <bool LAST, class T, class G, class W, int VEC>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : LAST ? 2 : 3)
    group_norm_backward(const G* g, const T* x, const W* weight, T* dx, Wide<T>* partial, i64 samples, i64 groups,
                        i64 inside, i64 spatial, double eps)
{
    using A = Wide<T>;
    SHARED(Pair<A>, table, THREADS);
    for (i64 index = blockIdx.x; index < samples * groups; index += gridDim.x) {
        const Group o = group_of(index, groups, inside, spatial, LAST);
        const T* xs = x + o.base;
        const G* gs = g + o.base;
        const Scale<A> s = group_scale<LAST, VEC>(xs, o, eps);
        A* sums = partial + o.sample * 2 * o.channels + o.first_channel;
        A along_one = A(0), along_n = A(0);
        // The sums of a channel, by one thread.
        const auto found = [&](i64 c, A one, A n) {
            sums[c] = n;
            sums[o.channels + c] = one;
            const A w = wide(weight[o.first_channel + c]);
            along_one += w * one;
            along_n += w * n;
        };
        // The elements of a vector, added to the sums of their channel.
        const auto add = [&](i64 at, A& one, A& n) {
            const Vector<T, VEC> v = vector_at<VEC>(xs + at);
            const Vector<G, VEC> d = vector_at<VEC>(gs + at);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                one += wide(d.at[k]);
                n += wide(d.at[k]) * ((wide(v.at[k]) - s.mean) * s.inverse);
            }
        };
        if constexpr (LAST) {
            // Threads of one channel stand `inside` apart, so that neighbours read neighbours.
            for (i64 start = 0; start < inside; start += THREADS) {
                const int wide_channels = (int)(inside - start < THREADS ? inside - start : THREADS);
                const int per = THREADS / wide_channels, t = threadIdx.x;
                A one = A(0), n = A(0);
                if (t < per * wide_channels)
                    for (i64 p = t / wide_channels; p < spatial; p += per) add(p * o.channels + start + t % wide_channels, one, n);
                __syncthreads();
                table[t] = Pair<A>{one, n};
                __syncthreads();
                if (t < wide_channels) {
                    for (int i = 1; i < per; ++i) {
                        one += table[i * wide_channels + t].a;
                        n += table[i * wide_channels + t].b;
                    }
                    found(start + t, one, n);
                }
            }
        } else if (inside >= WARPS) {  // a warp for each channel
            for (i64 c = threadIdx.x / 32; c < inside; c += WARPS) {
                A one = A(0), n = A(0);
#pragma unroll(VEC > 1 ? 2 : 4)
                for (i64 i = c * spatial + threadIdx.x % 32 * VEC; i < (c + 1) * spatial; i += 32 * VEC) add(i, one, n);
                one = warp_reduce<Add>(one);
                n = warp_reduce<Add>(n);
                if (threadIdx.x % 32 == 0) found(c, one, n);
            }
        } else {  // all threads for each channel
            for (i64 c = 0; c < inside; ++c) {
                A one = A(0), n = A(0);
#pragma unroll(VEC > 1 ? 2 : 4)
                for (i64 i = c * spatial + threadIdx.x * VEC; i < (c + 1) * spatial; i += THREADS * VEC) add(i, one, n);
                const Pair<A> p = row_sums<THREADS>(one, n);
                if (threadIdx.x == 0) found(c, p.a, p.b);
            }
        }
        const Pair<A> p = row_sums<THREADS>(along_one, along_n);
        const A one = p.a / A(o.size()), slope = p.b / A(o.size());
        walk<LAST, VEC>(o, [&](i64 at, i64 c) {
            const Vector<T, VEC> v = vector_at<VEC>(xs + at);
            const Vector<G, VEC> d = vector_at<VEC>(gs + at);
            const A w = wide(weight[o.first_channel + c]);
            Vector<T, VEC> out;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A n = (wide(v.at[k]) - s.mean) * s.inverse;
                out.at[k] = narrow<T>((wide(d.at[k]) * w - one - n * slope) * s.inverse);
            }
            store_vector<VEC>(dx + o.base + at, out);
        });
    }
}
