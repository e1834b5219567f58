// Products of a warp on the tensor cores, of floats of two bytes that lie in shared memory, with sums in float32.
//
// A tile is rows of D elements in shared memory, each followed by 16 bytes that nobody uses: so the rows that eight lanes read
// at once lie in different banks. Sums are fragments of PTX's mma.m16n8k16: of each block of 16 x 8 a lane has the rows
// lane / 4 and lane / 4 + 8, and there the columns lane % 4 * 2 and the next. Needs compute capability 8.0.
#pragma once
#include "headers/types.cuh"

template <class T>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<bfloat16> = true;

template <int D, class T = bfloat16>
constexpr int STRIDE = D + 16 / (int)sizeof(T);

// Two numbers as they lie in a register; the first in its lower half.
template <class T>
__device__ inline u32 pack(float first, float second)
{
#if defined(EMULATED) || __CUDA_ARCH__ < 800
    return narrow<T>(first).bits | (u32)narrow<T>(second).bits << 16;
#else
    u32 y;
    if constexpr (IS_BFLOAT16<T>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
#endif
}

#if defined(EMULATED)

template <class T>
__device__ inline float half_of(u32 x, int upper)
{
    return wide(T{(unsigned short)(upper ? x >> 16 : x)});
}

template <class T>
__device__ inline void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    Vector<u32, 4> rows[32], own{a[0], a[1], a[2], a[3]};
    Vector<u32, 2> columns[32];
    emulation::of_all_lanes(own, rows);
    emulation::of_all_lanes(Vector<u32, 2>{b0, b1}, columns);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float s = 0;
        for (int k = 0; k < 16; ++k)
            s += half_of<T>(rows[row % 8 * 4 + k % 8 / 2].at[row / 8 + k / 8 * 2], k % 2) *
                 half_of<T>(columns[column * 4 + k % 8 / 2].at[k / 8], k % 2);
        sum[i] += s;
    }
}

// Four matrices of 8 x 8: lane i gives the address of row i % 8 of matrix i / 8, and gets of each matrix two neighbours.
template <bool TRANSPOSED, class T>
__device__ inline void load_matrices(u32 (&out)[4], const T* row)
{
    const T* rows[32];
    emulation::of_all_lanes(row, rows);
    const int lane = threadIdx.x % 32, i = lane / 4, j = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
        const T x = TRANSPOSED ? rows[8 * m + j][i] : rows[8 * m + i][j];
        const T y = TRANSPOSED ? rows[8 * m + j + 1][i] : rows[8 * m + i][j + 1];
        out[m] = x.bits | (u32)y.bits << 16;
    }
}

// 16 bytes, or zeros; they are there after the next wait of the thread.
template <class T>
__device__ inline void copy_later(T* shared, const T* global, bool there)
{
    emulation::copy_later(shared, there ? global : nullptr);
}
__device__ inline void wait_for_copies() { emulation::wait_for_copies(); }

#else  // the same on a device

template <class T>
__device__ inline void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
#if __CUDA_ARCH__ >= 800
#define MULTIPLY_ADD(types)                                                                                         \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_BFLOAT16<T>)
        MULTIPLY_ADD("bf16.bf16");
    else
        MULTIPLY_ADD("f16.f16");
#undef MULTIPLY_ADD
#endif
}

template <bool TRANSPOSED, class T>
__device__ inline void load_matrices(u32 (&out)[4], const T* row)
{
    const u32 at = (u32)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
}

template <class T>
__device__ inline void copy_later(T* shared, const T* global, bool there)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
#else
    constexpr int N = 16 / sizeof(T);
    *reinterpret_cast<Vector<T, N>*>(shared) = there ? vector_at<N>(global) : Vector<T, N>{};
#endif
}
__device__ inline void wait_for_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif

// `N` rows of D elements: row i begins at `matrix + at(i)`, and has `width` elements; zeros beyond, and from row `count` on.
// `aligned`: all begin and end where the device loads 16 bytes. They are there after the next wait and the next barrier.
template <int D, int N, class T, class At>
__device__ inline void load_tile(T* tile, const T* matrix, int count, int width, bool aligned, const At& at)
{
    constexpr int EACH = 16 / sizeof(T);
    for (int i = threadIdx.x; i < N * (D / EACH); i += blockDim.x) {
        const int row = i / (D / EACH), column = i % (D / EACH) * EACH;
        const bool there = row < count && column < width;
        const T* const from = there ? matrix + at(row) + column : matrix;
        T* const to = tile + row * STRIDE<D, T> + column;
        if (aligned)
            copy_later(to, from, there);
        else
#pragma unroll
            for (int c = 0; c < EACH; ++c) to[c] = there && column + c < width ? from[c] : T{};
    }
}

// 16 x 16 of a left factor, from `row` and `k` on: of a tile of its rows, or TRANSPOSED, of its columns.
template <bool TRANSPOSED, int D, class T>
__device__ inline void left_fragment(u32 (&out)[4], const T* tile, int row, int k)
{
    const int lane = threadIdx.x % 32;
    if constexpr (TRANSPOSED)
        load_matrices<true>(out, tile + (k + lane / 16 * 8 + lane % 8) * STRIDE<D> + row + lane / 8 % 2 * 8);
    else
        load_matrices<false>(out, tile + (row + lane % 16) * STRIDE<D> + k + lane / 16 * 8);
}

// Two neighbours of 16 x 8 of a right factor, from `k` and `column` on: of a tile of its rows, or TRANSPOSED, of its columns.
template <bool TRANSPOSED, int D, class T>
__device__ inline void right_fragments(u32 (&out)[4], const T* tile, int k, int column)
{
    const int lane = threadIdx.x % 32;
    if constexpr (TRANSPOSED)
        load_matrices<false>(out, tile + (column + lane / 16 * 8 + lane % 8) * STRIDE<D> + k + lane / 8 % 2 * 8);
    else
        load_matrices<true>(out, tile + (k + lane % 16) * STRIDE<D> + column + lane / 16 * 8);
}
