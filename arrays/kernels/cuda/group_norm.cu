// group_norm, and instance_norm as groups of one channel: a group of a sample is a row, with a weight and a bias for each channel.
//
// Of channels as the second dimension, where a group lies without gaps (`channel_norm.cu` has the others).
#include "headers/row.cuh"

// Elements that are left of a channel, as far as a vector goes.
__device__ inline int capped(i64 n) { return n < 8 ? (int)n : 8; }

template <class T, class G, int THREADS, int ITEMS, bool ENDS>
__global__ void __launch_bounds__(THREADS < 256 ? 256 : THREADS, ITEMS || ENDS || sizeof(Wide<T>) == 8 ? 1 : 2)
    group_norm_forward(const T* x, const G* weight, const G* bias, G* y, i64 samples, i64 groups, i64 inside, i64 spatial, int kept, double eps)
{
    DYNAMIC_SHARED(char, shared);
    const i64 length = inside * spatial, step = (i64)gridDim.x * blockDim.y;
    const bool small = length <= 0xffffffffLL;
    for (i64 index = (i64)blockIdx.x * blockDim.y + threadIdx.y; index < samples * groups; index += step) {
        const Shape<T, THREADS, ITEMS, ENDS, true> cut(x + index * length, length);
        const CutRow<T, THREADS, ITEMS, 16 / sizeof(T)> r(x + index * length, cut, shared, kept);
        const Scale<Wide<T>> s = row_scale<true>(r, cut, length, eps);
        const i64 first = index % groups * inside;
        cut.store(y + index * length, [&](auto p) {
            i64 c = divided(p.column, spatial, small);
            int left = capped((c + 1) * spatial - p.column);
            c += first;
            Wide<T> w = wide(weight[c]), b = wide(bias[c]);
            return [=, v = r(p)](int k) mutable {
                if (k == left) {  // the next channel begins within the vector
                    left += capped(spatial), ++c;
                    w = wide(weight[c]), b = wide(bias[c]);
                }
                return (wide(v.at[k]) - s.mean) * s.inverse * w + b;
            };
        });
    }
}

// dx, and partial[sample][which][channel] of what weight and bias get.
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

template <class T, class G, bool ENDS>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : sizeof(G) > sizeof(T) ? 2 : 3)
    group_norm_backward(const G* g, const T* x, const G* weight, T* dx, Wide<T>* partial, i64 samples, i64 groups,
                        i64 inside, i64 spatial, int kept, double eps)
{
    using A = Wide<T>;
    constexpr int VEC = 16 / sizeof(T);
    DYNAMIC_SHARED(char, shared);
    const i64 length = inside * spatial, channels = groups * inside;
    const bool small = length <= 0xffffffffLL;
    for (i64 index = blockIdx.x; index < samples * groups; index += gridDim.x) {
        const i64 at = index * length, sample = index / groups, first = (index - sample * groups) * inside;
        const Shape<T, THREADS, 0, ENDS, true> cut(x + at, length);
        const CutRow<T, THREADS, 0, VEC> r(x + at, cut, shared, kept);
        const CutRow<G, THREADS, 0, VEC> d(g + at, cut, r.rest(), kept);
        cut.each([&](auto p) {
            if (p.size > 1 && p.j < kept) d.first(p);
        });
        const Scale<A> s = row_scale<true>(r, cut, length, eps);  // with barriers: the rows are there
        A* sums = partial + sample * 2 * channels + first;
        A along_one = A(0), along_n = A(0);
        // The sums of a channel, by one thread.
        const auto found = [&](i64 c, A one, A n) {
            sums[c] = n;
            sums[channels + c] = one;
            const A w = wide(weight[first + c]);
            along_one += w * one;
            along_n += w * n;
        };
        const auto add = [&](auto p, A& one, A& n) {
            const auto v = r.any(p, cut);
            const auto e = d.any(p, cut);
#pragma unroll
            for (int k = 0; k < p.size; ++k) {
                one += wide(e.at[k]);
                n += wide(e.at[k]) * ((wide(v.at[k]) - s.mean) * s.inverse);
            }
        };
        if (inside >= WARPS) {  // a warp for each channel
            for (i64 c = threadIdx.x / 32; c < inside; c += WARPS) {
                A one = A(0), n = A(0);
                cut.template each_between<32>(c * spatial, (c + 1) * spatial, threadIdx.x % 32, [&](auto p) { add(p, one, n); });
                one = warp_reduce<Add>(one);
                n = warp_reduce<Add>(n);
                if (threadIdx.x % 32 == 0) found(c, one, n);
            }
        } else {  // all threads for each channel
            for (i64 c = 0; c < inside; ++c) {
                A one = A(0), n = A(0);
                cut.template each_between<THREADS>(c * spatial, (c + 1) * spatial, threadIdx.x, [&](auto p) { add(p, one, n); });
                const Pair<A> p = row_sums<THREADS>(one, n);
                if (threadIdx.x == 0) found(c, p.a, p.b);
            }
        }
        const Pair<A> p = row_sums<THREADS>(along_one, along_n);
        const A one = p.a / A(length), slope = p.b / A(length);
        cut.store(dx + at, [&](auto p) {
            i64 c = divided(p.column, spatial, small);
            int left = capped((c + 1) * spatial - p.column);
            c += first;
            A w = wide(weight[c]);
            return [=, v = r(p), e = d(p)](int k) mutable {
                if (k == left) left += capped(spatial), w = wide(weight[++c]);
                const A n = (wide(v.at[k]) - s.mean) * s.inverse;
                return (wide(e.at[k]) * w - one - n * slope) * s.inverse;
            };
        });
    }
}
