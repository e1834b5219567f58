// group_norm, and instance_norm as groups of one channel: a block for each group of each sample.
//
// Of channels as the second dimension, where a group lies without gaps (`channel_norm.cu` has the others). A group is read again for
// every step, from the second-level cache as long as the groups at work fit there.
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

__device__ inline Group group_of(i64 index, i64 groups, i64 inside, i64 spatial)
{
    const i64 channels = groups * inside, sample = index / groups, first = (index - sample * groups) * inside;
    return Group{sample, (sample * channels + first) * spatial, first, channels, inside, spatial};
}

// f(offset from the group's base, channel within the group) for each vector of the group.
template <int VEC, class F>
__device__ inline void walk(const Group& g, F f)
{
    Walk w(g.spatial / VEC);
    const i64 vectors = g.size() / VEC;
#pragma unroll 2
    for (i64 e = threadIdx.x; e < vectors; e += THREADS, w.next()) f(e * VEC, w.outer);
}

template <class A>
struct Scale {
    A mean, inverse;
};

template <int VEC, class T>
__device__ inline Scale<Wide<T>> group_scale(const T* x, const Group& g, double eps)
{
    using A = Wide<T>;
    Moments<A> m = Moments<A>::none();
    constexpr int EACH = VEC == 1 ? 8 : 1;  // vectors a merge, which divides
    A a[EACH * VEC];
#pragma unroll(VEC == 1 ? 1 : 2)
    for (i64 e = (i64)threadIdx.x * VEC; e < g.size();) {
        int count = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j, e += THREADS * VEC) {
            Vector<T, VEC> v{};
            if (e < g.size()) {
                v = vector_at<VEC>(x + e);
                count += VEC;
            }
#pragma unroll
            for (int k = 0; k < VEC; ++k) a[j * VEC + k] = wide(v.at[k]);
        }
        m.add(a, count);
    }
    m = row_moments<THREADS>(m);
    return Scale<A>{m.mean, A(1) / sqrt(m.m2 / A(g.size()) + A(eps))};
}

template <class T, class G, class W, int VEC>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : 3) group_norm_forward(const T* x, const W* weight, const W* bias, G* y,
                                                                i64 samples, i64 groups, i64 inside, i64 spatial,
                                                                double eps)
{
    using A = Wide<T>;
    for (i64 index = blockIdx.x; index < samples * groups; index += gridDim.x) {
        const Group g = group_of(index, groups, inside, spatial);
        const Scale<A> s = group_scale<VEC>(x + g.base, g, eps);
        walk<VEC>(g, [&](i64 at, i64 c) {
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
template <class T, class G, class W, int VEC>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : 3)
    group_norm_backward(const G* g, const T* x, const W* weight, T* dx, Wide<T>* partial, i64 samples, i64 groups,
                        i64 inside, i64 spatial, double eps)
{
    using A = Wide<T>;
    for (i64 index = blockIdx.x; index < samples * groups; index += gridDim.x) {
        const Group o = group_of(index, groups, inside, spatial);
        const T* xs = x + o.base;
        const G* gs = g + o.base;
        const Scale<A> s = group_scale<VEC>(xs, o, eps);
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
        if (inside >= WARPS) {  // a warp for each channel
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
        walk<VEC>(o, [&](i64 at, i64 c) {
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
