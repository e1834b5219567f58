// batch_norm: statistics of each channel over a whole batch in two stages, then one pass that is linear in each element.
//
// LAST says whether the channels are the last dimension (rows × channels) or the second (samples × channels × positions).
#include "row.cuh"

constexpr int THREADS = 256;
template <int VEC>
constexpr int CHUNK = VEC == 1 ? 8 : 2;  // vectors at a time

// ----- sums over the batch, of a share of it for each block -------------------------------------------------------------

// f(k, offset) for up to CHUNK vectors at a time of channel blockIdx.x (!LAST, VEC divides the positions), or of elements of one of 32
// channels (LAST); after(count) when they were given. Blocks along y have a share each.
template <bool LAST, int VEC, class F, class After>
__device__ inline void each_of_channel(i64 channel, i64 samples, i64 channels, i64 spatial, F f, After after)
{
    if constexpr (LAST) {
        const i64 rows = samples * spatial, step = (i64)gridDim.y * blockDim.y;
        for (i64 row = (i64)blockIdx.y * blockDim.y + threadIdx.y; row < rows;) {
            int count = 0;
#pragma unroll
            for (int k = 0; k < CHUNK<1>; ++k, row += step)
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
            for (int k = 0; k < CHUNK<VEC>; ++k) {
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

// partial[share][channel]; blocks of THREADS threads a channel (!LAST), or of 32 channels by 8 rows (LAST).
template <bool LAST, class T, int VEC>
__global__ void __launch_bounds__(THREADS, 4)
    batch_moments(const T* x, Moments<Wide<T>>* partial, i64 samples, i64 channels, i64 spatial)
{
    using A = Wide<T>;
    const i64 channel = LAST ? (i64)blockIdx.x * 32 + threadIdx.x : (i64)blockIdx.x;
    Moments<A> m = Moments<A>::none();
    A v[CHUNK<VEC> * VEC];
#pragma unroll
    for (int k = 0; k < CHUNK<VEC> * VEC; ++k) v[k] = A(0);
    if (channel < channels)
        each_of_channel<LAST, VEC>(
            channel, samples, channels, spatial,
            [&](int k, i64 at) {
                const Vector<T, VEC> found = vector_at<VEC>(x + at);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[k * VEC + i] = wide(found.at[i]);
            },
            [&](int count) { m.add(v, count * VEC); });
    if constexpr (LAST) {
        SHARED(Moments<A>, tile, 8 * 32);
        tile[threadIdx.y * 32 + threadIdx.x] = m;
        __syncthreads();
        if (threadIdx.y == 0 && channel < channels) {
            for (int y = 1; y < 8; ++y) m.merge(tile[y * 32 + threadIdx.x]);
            partial[(i64)blockIdx.y * channels + channel] = m;
        }
    } else {
        m = row_moments<THREADS>(m);
        if (threadIdx.x == 0) partial[(i64)blockIdx.y * channels + channel] = m;
    }
}

// partial[share][which][channel]: sums of g times the normalised element, and of g.
template <bool LAST, class T, class G, int VEC>
__global__ void __launch_bounds__(THREADS, 4)
    batch_sums(const G* g, const T* x, const Wide<T>* mean, const Wide<T>* var, Wide<T>* partial, i64 samples,
               i64 channels, i64 spatial, double eps)
{
    using A = Wide<T>;
    const i64 channel = LAST ? (i64)blockIdx.x * 32 + threadIdx.x : (i64)blockIdx.x;
    A one = A(0), n = A(0);
    if (channel < channels) {
        const A center = mean[channel], inverse = A(1) / sqrt(var[channel] + A(eps));
        each_of_channel<LAST, VEC>(
            channel, samples, channels, spatial,
            [&](int, i64 at) {
                const Vector<T, VEC> v = vector_at<VEC>(x + at);
                const Vector<G, VEC> d = vector_at<VEC>(g + at);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    one += wide(d.at[k]);
                    n += wide(d.at[k]) * ((wide(v.at[k]) - center) * inverse);
                }
            },
            [](int) {});
    }
    A* out = partial + (i64)blockIdx.y * 2 * channels;
    if constexpr (LAST) {
        SHARED(Pair<A>, tile, 8 * 32);
        tile[threadIdx.y * 32 + threadIdx.x] = Pair<A>{n, one};
        __syncthreads();
        if (threadIdx.y == 0 && channel < channels) {
            for (int y = 1; y < 8; ++y) {
                n += tile[y * 32 + threadIdx.x].a;
                one += tile[y * 32 + threadIdx.x].b;
            }
            out[channel] = n;
            out[channels + channel] = one;
        }
    } else {
        const Pair<A> p = row_sums<THREADS>(n, one);
        if (threadIdx.x == 0) {
            out[channel] = p.a;
            out[channels + channel] = p.b;
        }
    }
}

// ----- one thread a channel ---------------------------------------------------------------------------------------------

template <class A>
__global__ void __launch_bounds__(THREADS)
    merge_moments(const Moments<A>* partial, A* mean, A* var, i64 parts, i64 channels)
{
    const i64 c = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (c >= channels) return;
    Moments<A> m = Moments<A>::none();
    for (i64 p = 0; p < parts; ++p) m.merge(partial[p * channels + c]);
    mean[c] = m.mean;
    var[c] = m.m2 / m.n;
}

// What `linear` needs to give dx, from the sums of all shares and from the cotangents of mean and variance.
template <class A>
__global__ void __launch_bounds__(THREADS)
    backward_factors(const A* sums, const A* mean, const A* var, const A* weight, const A* g_mean, const A* g_var,
                     A* factors, double count, i64 channels, double eps)
{
    const i64 c = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (c >= channels) return;
    const A inverse = A(1) / sqrt(var[c] + A(eps)), scale = weight[c] * inverse, n = A(count);
    factors[c] = mean[c];
    factors[channels + c] = (A(2) * g_var[c] - scale * inverse * sums[c]) / n;
    factors[2 * channels + c] = (g_mean[c] - scale * sums[channels + c]) / n;
    factors[3 * channels + c] = scale;
}

template <class A>
__global__ void __launch_bounds__(THREADS) forward_factors(const A* mean, const A* var, const A* weight, const A* bias,
                                                           A* factors, i64 channels, double eps)
{
    const i64 c = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (c >= channels) return;
    factors[c] = mean[c];
    factors[channels + c] = weight[c] / sqrt(var[c] + A(eps));
    factors[2 * channels + c] = bias[c];
}

// ----- one pass over the batch ------------------------------------------------------------------------------------------

// out = (x - f0) * f1 + f2 (+ g * f3), with factors f of the element's channel. A vector is of one channel (!LAST, VEC divides
// the positions) or of neighbouring channels (LAST, VEC divides the channels).
template <bool LAST, bool WITH_G, class T, class G, class O, int VEC>
__global__ void __launch_bounds__(THREADS)
    linear(const T* x, const G* g, const Wide<T>* factors, O* out, i64 total, i64 channels, i64 spatial)
{
    using A = Wide<T>;
    const i64 vectors = total / VEC, step = (i64)gridDim.x * THREADS;
    const bool small = total <= 0xffffffffLL;  // a division of 32 bits costs a quarter of one of 64
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < vectors; i += step) {
        const i64 at = i * VEC;
        i64 c;
        if (small)
            c = LAST ? (u32)at % (u32)channels : (u32)at / (u32)spatial % (u32)channels;
        else
            c = LAST ? at % channels : at / spatial % channels;
        const Vector<T, VEC> v = vector_at<VEC>(x + at);
        Vector<G, VEC> d;
        if constexpr (WITH_G) d = vector_at<VEC>(g + at);
        constexpr int EACH = LAST ? VEC : 1;  // the channels of a vector
        const A* f = factors + c;
        const Vector<A, EACH> f0 = vector_at<EACH>(f), f1 = vector_at<EACH>(f + channels), f2 = vector_at<EACH>(f + 2 * channels);
        Vector<A, EACH> f3;
        if constexpr (WITH_G) f3 = vector_at<EACH>(f + 3 * channels);
        Vector<O, VEC> y;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const int n = LAST ? k : 0;
            A r = (wide(v.at[k]) - f0.at[n]) * f1.at[n] + f2.at[n];
            if constexpr (WITH_G) r += wide(d.at[k]) * f3.at[n];
            y.at[k] = narrow<O>(r);
        }
        store_vector<VEC>(out + at, y);
    }
}
