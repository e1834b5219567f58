// Norms of images by channel, in three launches: sums of each channel by shares, a few factors a channel, and one pass that is
// linear in each element.
//
// A set of samples has statistics of its own: the batch of batch_norm, each sample of group_norm. LAST says whether the channels are
// the last dimension (rows × channels) or the second (samples × channels × positions). Vectors are of neighbouring channels, or of
// positions of one.
#include "headers/reduce.cuh"

constexpr int THREADS = 256;

// ----- sums -------------------------------------------------------------------------------------------------------------

// Moments of N neighbouring channels with as many numbers each, which one division serves; WITH_G sums of a cotangent g, and of g
// times the deviation from the mean.
template <class A, int N, bool WITH_G>
struct Sums {
    A n, mean[N], m2[N], one[N], cross[N];

    // Channel j has other numbers too: this part of the new total, with their own mean and sums.
    __device__ void merge(int j, A part, A its_mean, A its_m2, A its_one, A its_cross)
    {
        const A d = its_mean - mean[j], step = d * part;
        mean[j] += step;
        m2[j] += its_m2 + d * step * n;
        if constexpr (WITH_G) {
            cross[j] += its_cross + (d - step) * its_one - step * one[j];
            one[j] += its_one;
        }
    }

    __device__ void merge(const Sums& o)
    {
        const A total = n + o.n;
        if (total == A(0)) return;
        const A part = o.n / total;
#pragma unroll
        for (int j = 0; j < N; ++j) merge(j, part, o.mean[j], o.m2[j], o.one[j], o.cross[j]);
        n = total;
    }

    // The first `count` of C / N numbers of each channel: number k of channel j is x[k * N + j].
    template <int C>
    __device__ void add(const A (&x)[C], const A (&g)[C], int count)
    {
        const A more = A(count), total = n + more, part = more / total, inverse = A(1) / more;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            A s = A(0), q = A(0), its_one = A(0), its_cross = A(0);
#pragma unroll
            for (int k = 0; k < C / N; ++k) s += k < count ? x[k * N + j] : A(0);
            const A m = s * inverse;
#pragma unroll
            for (int k = 0; k < C / N; ++k) {
                const A d = k < count ? x[k * N + j] - m : A(0);
                q += d * d;
                if constexpr (WITH_G) {
                    its_one += k < count ? g[k * N + j] : A(0);
                    its_cross += k < count ? g[k * N + j] * d : A(0);
                }
            }
            merge(j, part, m, q, its_one, its_cross);
        }
        n = total;
    }

    __device__ Sums<A, 1, WITH_G> of(int j) const
    {
        return Sums<A, 1, WITH_G>{n, {mean[j]}, {m2[j]}, {one[j]}, {cross[j]}};
    }
};

// The sums of the threads t, t + lanes, … of a block (`lanes` a power of two) come to thread t < lanes, always in the same order.
template <class S>
__device__ inline void join_threads(S& mine, int lanes)
{
    SHARED(S, tile, THREADS / 2);
    const int t = threadIdx.x;
    for (int half = THREADS / 2; half >= lanes; half /= 2) {
        __syncthreads();  // the tile may still be read
        if (t >= half && t < 2 * half) tile[t - half] = mine;
        __syncthreads();
        if (t < half) mine.merge(tile[t]);
    }
}

// f(k, offset) for up to CHUNK vectors at a time of a channel (!LAST), or of `lanes` neighbouring vectors of channels (LAST);
// after(count) when they were given. Blocks along y have a share each.
template <bool LAST, int VEC, int CHUNK, class F, class After>
__device__ inline void each_of_channel(i64 channel, i64 samples, i64 channels, i64 spatial, int lanes, F f, After after)
{
    if constexpr (LAST) {
        const int per = THREADS / lanes;
        const i64 rows = samples * spatial, step = (i64)gridDim.y * per;
        for (i64 row = (i64)blockIdx.y * per + (int)threadIdx.x / lanes; row < rows;) {
            int count = 0;
#pragma unroll
            for (int k = 0; k < CHUNK; ++k, row += step)
                if (row < rows) {
                    f(k, row * channels + channel);
                    count = k + 1;
                }
            after(count);
        }
    } else {
        spatial /= VEC;
        const i64 total = samples * spatial, step = (i64)gridDim.y * THREADS;
        const i64 step_sample = step / spatial, step_position = step % spatial;
        i64 e = (i64)blockIdx.y * THREADS + threadIdx.x, sample = e / spatial, position = e % spatial;
        while (e < total) {
            int count = 0;
#pragma unroll
            for (int k = 0; k < CHUNK; ++k) {
                if (e < total) {
                    f(k, ((sample * channels + channel) * spatial + position) * VEC);
                    count = k + 1;
                }
                e += step;
                sample += step_sample;
                position += step_position;
                if (position >= spatial) {
                    position -= spatial;
                    ++sample;
                }
            }
            after(count);
        }
    }
}

// partial[set, channel][share]. Blocks along x have a channel of a set each (!LAST, where a set is the batch or one sample), or
// `lanes` vectors of channels of a set.
template <bool LAST, bool WITH_G, class T, class G, int VEC>
__global__ void __launch_bounds__(THREADS, sizeof(Wide<T>) == 8 ? 1 : LAST && WITH_G ? 2 : 3)
    channel_sums(const T* x, const G* g, Sums<Wide<T>, 1, WITH_G>* partial, i64 sets, i64 samples, i64 channels, i64 spatial, int lanes)
{
    using A = Wide<T>;
    constexpr int CHUNK = VEC == 1 ? 8 : WITH_G ? 2 : 4, N = LAST ? VEC : 1;
    const i64 tiles = LAST ? (channels + lanes * VEC - 1) / (lanes * VEC) : channels, set = blockIdx.x / tiles;
    i64 channel = blockIdx.x - set * tiles;
    if constexpr (LAST)
        channel = (channel * lanes + threadIdx.x % lanes) * VEC;
    const i64 base = set * channels * samples * spatial;
    Sums<A, N, WITH_G> s{};
    A v[CHUNK * VEC], d[CHUNK * VEC];
#pragma unroll
    for (int k = 0; k < CHUNK * VEC; ++k) v[k] = d[k] = A(0);
    if (channel < channels)
        each_of_channel<LAST, VEC, CHUNK>(
            channel, samples, channels, spatial, lanes,
            [&](int k, i64 at) {
                const Vector<T, VEC> found = vector_at<VEC>(x + base + at);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[k * VEC + i] = wide(found.at[i]);
                if constexpr (WITH_G) {
                    const Vector<G, VEC> given = vector_at<VEC>(g + base + at);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) d[k * VEC + i] = wide(given.at[i]);
                }
            },
            [&](int count) { s.add(v, d, count * (VEC / N)); });
    join_threads(s, lanes);
    if ((int)threadIdx.x < lanes && channel < channels)
#pragma unroll
        for (int j = 0; j < N; ++j) partial[(set * channels + channel + j) * gridDim.y + blockIdx.y] = s.of(j);
}

// ----- factors ----------------------------------------------------------------------------------------------------------

// The sums of `count` of them, for every thread.
template <class S>
__device__ inline S joined(const S* partial, i64 count)
{
    SHARED(S, all, 1);
    S s{};
    for (i64 i = threadIdx.x; i < count; i += THREADS) s.merge(partial[i]);
    join_threads(s, 1);
    if (threadIdx.x == 0) all[0] = s;
    __syncthreads();
    return all[0];
}

// Mean and variance of a group of `inside` channels of a set for each block (JOIN), and for `linear` to give the norm. Running
// statistics, where there are some, move by their shares of the new ones.
template <bool JOIN, class A, class W, class R>
__global__ void __launch_bounds__(THREADS)
    forward_factors(const Sums<A, 1, false>* partial, A* mean, A* var, const W* weight, const W* bias, A* factors,
                    i64 parts, i64 inside, i64 channels, i64 all, double eps, const R* old_mean, const R* old_var, R* new_mean,
                    R* new_var, double momentum, double share_of_var)
{
    const i64 first = (i64)blockIdx.x * inside;
    A center = A(0), spread = A(0);
    if constexpr (JOIN) {
        const auto s = joined(partial + first * parts, inside * parts);
        center = s.mean[0], spread = s.m2[0] / s.n;
    }
    for (i64 c = first + threadIdx.x; c < first + inside && c < all; c += THREADS) {
        if constexpr (JOIN) {
            mean[c] = center, var[c] = spread;
            if (new_mean) {
                new_mean[c] = narrow<R>(Wide<R>(wide(old_mean[c]) * (1 - momentum) + center * momentum));
                new_var[c] = narrow<R>(Wide<R>(wide(old_var[c]) * (1 - momentum) + spread * share_of_var));
            }
        } else
            center = mean[c], spread = var[c];
        factors[c] = center;
        factors[all + c] = wide(weight[c % channels]) / sqrt(spread + A(eps));
        factors[2 * all + c] = wide(bias[c % channels]);
    }
}

// For `linear` to give dx, and sums[set][which][channel] of what weight and bias get: a block for each group of `inside` channels of
// a set, of `count` numbers. Batches come with their statistics and the cotangents of these.
template <bool BATCH, class A, class W, class O>
__global__ void __launch_bounds__(THREADS)
    backward_factors(const Sums<A, 1, true>* partial, const A* mean, const A* var, const A* g_mean, const A* g_var,
                     const W* weight, O* sums, A* factors, i64 parts, i64 inside, i64 channels, i64 all, int lanes, double count,
                     double eps)
{
    const i64 first = (i64)blockIdx.x * inside;
    A center, spread;
    if constexpr (BATCH)
        center = mean[first], spread = var[first];
    else {
        const auto s = joined(partial + first * parts, inside * parts);
        center = s.mean[0], spread = s.m2[0] / s.n;
    }
    const A inverse = A(1) / sqrt(spread + A(eps));
    A along_one = A(0), along_n = A(0);
    for (i64 start = 0; start < inside; start += lanes) {
        const i64 k = start + threadIdx.x % lanes, c = first + k;
        Sums<A, 1, true> s{};
        if (k < inside)
            for (i64 p = threadIdx.x / lanes; p < parts; p += THREADS / lanes) s.merge(partial[c * parts + p]);
        join_threads(s, lanes);
        if ((int)threadIdx.x < lanes && k < inside) {
            const A one = s.one[0], n = (s.cross[0] + (s.mean[0] - center) * one) * inverse;
            const i64 set = c / channels, channel = c - set * channels;
            sums[set * 2 * channels + channel] = narrow<O>(n);
            sums[(set * 2 + 1) * channels + channel] = narrow<O>(one);
            along_one += wide(weight[channel]) * one;
            along_n += wide(weight[channel]) * n;
        }
    }
    const Pair<A> p = row_sums<THREADS>(along_one, along_n);
    A slope = -inverse * inverse * p.b, level = -inverse * p.a;
    if constexpr (BATCH) slope += A(2) * g_var[first], level += g_mean[first];
    for (i64 c = first + threadIdx.x; c < first + inside; c += THREADS) {
        factors[c] = center;
        factors[all + c] = slope / A(count);
        factors[2 * all + c] = level / A(count);
        factors[3 * all + c] = wide(weight[c % channels]) * inverse;
    }
}

// ----- one pass over all ------------------------------------------------------------------------------------------------

template <class A>
struct Factors {
    A center, slope, level, of_g;
    __device__ Factors(const A* f, i64 all, bool with_g) : center(f[0]), slope(f[all]), level(f[2 * all]), of_g(with_g ? f[3 * all] : A(0)) {}
};

// out = (x - center) * slope + level (+ g * of_g), with factors of the element's channel in its set, of `set` elements with the
// channels last. A vector is of neighbouring channels (LAST, VEC divides the channels), or of one or two channels (!LAST, VEC is no
// more than the positions). It divides the total.
template <bool LAST, bool WITH_G, class T, class G, class O, int VEC>
__global__ void __launch_bounds__(THREADS)
    linear(const T* x, const G* g, const Wide<T>* factors, O* out, i64 total, i64 channels, i64 spatial, i64 set, i64 all)
{
    using A = Wide<T>;
    const i64 vectors = total / VEC, step = (i64)gridDim.x * THREADS;
    const bool small = total <= 0xffffffffLL;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < vectors; i += step) {
        const i64 at = i * VEC;
        const i64 row = divided(at, LAST ? channels : spatial, small);
        const i64 c = LAST ? at - row * channels + (set < total ? divided(at, set, small) * channels : 0) : row - divided(row, all, small) * all;
        const Vector<T, VEC> v = vector_at<VEC>(x + at);
        Vector<G, VEC> d;
        if constexpr (WITH_G) d = vector_at<VEC>(g + at);
        Vector<O, VEC> y;
        const auto put = [&](int k, A center, A slope, A level, A of_g) {
            const A r = (wide(v.at[k]) - center) * slope + level;
            y.at[k] = narrow<O>(WITH_G ? r + wide(d.at[k]) * of_g : r);
        };
        if constexpr (LAST) {
            const A* f = factors + c;
            const Vector<A, VEC> f0 = vector_at<VEC>(f), f1 = vector_at<VEC>(f + all), f2 = vector_at<VEC>(f + 2 * all);
            Vector<A, VEC> f3{};
            if constexpr (WITH_G) f3 = vector_at<VEC>(f + 3 * all);
#pragma unroll
            for (int k = 0; k < VEC; ++k) put(k, f0.at[k], f1.at[k], f2.at[k], f3.at[k]);
        } else {
            const i64 end = (row + 1) * spatial - at;  // of the channel, from the vector on
            Factors<A> f(factors + c, all, WITH_G), next = f;
            if (end < VEC) next = Factors<A>(factors + (c + 1 < all ? c + 1 : 0), all, WITH_G);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const bool here = k < end;
                put(k, here ? f.center : next.center, here ? f.slope : next.slope, here ? f.level : next.level, here ? f.of_g : next.of_g);
            }
        }
        store_vector<VEC>(out + at, y);
    }
}
