// Asynchronous copies in groups, so that those of the steps after the next are under way while a step is multiplied.
#pragma once
#include "headers/matrices.cuh"

// Closes the group of the copies that the thread has begun since the last one; it may be empty.
__device__ inline void close_copies()
{
#if defined(EMULATED)
    emulation::close_copies();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for the copies of all groups but the thread's last BUT.
template <int BUT>
__device__ inline void wait_for_copies_but()
{
#if defined(EMULATED)
    emulation::wait_for_copies(BUT);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory");
#endif
}

// A ring of tiles in shared memory: while one is read, those of the next steps are copied. It has two to four stages.
struct Ring {
    int stages, now = 0, free;
    __device__ explicit Ring(int stages) : stages(stages), free(stages - 1) {}
    __device__ int next() const { return now + 1 == stages ? 0 : now + 1; }
    __device__ void turn() { free = now, now = next(); }

    // Waits for the step after those that were read, where each step has closed a group: the groups of the stages beyond may be under way.
    __device__ void wait() const
    {
        if (stages == 4)
            wait_for_copies_but<2>();
        else if (stages == 3)
            wait_for_copies_but<1>();
        else
            wait_for_copies_but<0>();
        __syncthreads();
    }
};
