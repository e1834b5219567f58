// CUDA's execution model for a C++ compiler, so that the kernels' own sources run on a CPU.
//
// Each CUDA thread is a fiber. The fibers of a block run one after another, in ascending or descending order of their numbers,
// until each waits: at a barrier, or in an exchange of its warp. What is read from shared memory before it was written is NaN,
// so that a missing barrier shows in one order or the other. An access outside of what the test mapped, a misaligned vector
// and a barrier that not all threads reach end the launch with an error that names the thread.
#pragma once
#define EMULATED 1

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

inline float from_half(unsigned short b)
{
    _Float16 h;
    std::memcpy(&h, &b, 2);
    return (float)h;
}
inline unsigned short to_half(float x)
{
    const _Float16 h = (_Float16)x;
    unsigned short b;
    std::memcpy(&b, &h, 2);
    return b;
}

enum State { READY, AT_BARRIER, IN_WARP, DONE };
enum Kind { NONE, SHUFFLE, BALLOT, SYNC };

struct Fiber {
    ucontext_t start;
    sigjmp_buf at;
    bool begun = false;
    State state = READY;
    unsigned rounds = 0;  // exchanges of the warp so far: the parity says which set of slots is in use
    Index index;
};
struct Warp {
    unsigned char slots[2][32][16];
    unsigned arrived = 0, alive = 0;
    Kind kind = NONE;
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static unsigned current;
static sigjmp_buf scheduler, rescue;
static void (*body)(void*);
static void* body_arguments;
static char message[256];
static unsigned block_number;  // of this process: shared memory belongs to one block

[[noreturn]] inline void fail(const char* what)
{
    std::snprintf(message, sizeof message, "%s in thread (%u, %u, %u) of block (%u, %u, %u)", what, threadIdx.x,
                  threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    siglongjmp(rescue, 1);
}

inline void yield()
{
    Fiber& f = fibers[current];
    if (!sigsetjmp(f.at, 0)) siglongjmp(scheduler, 1);
}

inline void fiber_main()
{
    for (;;) {
        body(body_arguments);
        fibers[current].state = DONE;
        yield();
    }
}

inline void resume(unsigned t)
{
    Fiber& f = fibers[t];
    current = t;
    threadIdx = f.index;
    if (!sigsetjmp(scheduler, 0)) {
        if (f.begun) siglongjmp(f.at, 1);
        f.begun = true;
        setcontext(&f.start);
    }
}

// Shared memory of one declaration: fresh, and full of NaN, in each block.
struct Shared {
    std::vector<unsigned char> bytes;
    unsigned owner = 0;
    void* get(size_t n)
    {
        if (owner != block_number || bytes.size() < n + 16) {
            bytes.assign(n + 16, 0xff);
            owner = block_number;
        }
        return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 15) & ~uintptr_t(15));
    }
};
static Shared dynamic;
static size_t dynamic_size;

template <class T>
T exchange(Kind kind, unsigned mask, T value, unsigned source_lane)
{
    static_assert(sizeof(T) <= 16, "a shuffle moves up to 16 bytes");
    if (mask != 0xffffffffu) fail("a warp operation without the whole warp");
    Fiber& f = fibers[current];
    Warp& w = warps[current / 32];
    const unsigned lane = current % 32, set = f.rounds++ & 1;
    if (w.alive != 32) fail("a warp operation of which some lanes have returned");
    if (w.arrived == 0) w.kind = kind;
    if (w.kind != kind) fail("different warp operations in one warp");
    std::memcpy(w.slots[set][lane], &value, sizeof value);
    if (++w.arrived == 32) {
        w.arrived = 0;
        for (unsigned i = 0; i < 32; ++i)
            if (fibers[current - lane + i].state == IN_WARP) fibers[current - lane + i].state = READY;
    } else {
        f.state = IN_WARP;
        yield();
    }
    T out;
    std::memcpy(&out, w.slots[set][source_lane & 31], sizeof out);
    return out;
}

inline void on_signal(int signal, siginfo_t*, void*)
{
    fail(signal == SIGILL ? "a misaligned or undefined operation" : "an illegal memory access");
}

struct Signals {  // the handlers of the process are put back after each launch
    struct sigaction old[3];
    stack_t old_stack;
    static constexpr int numbers[3] = {SIGSEGV, SIGBUS, SIGILL};
    std::vector<char> stack = std::vector<char>(1 << 16);
    Signals()
    {
        stack_t s{};
        s.ss_sp = stack.data();
        s.ss_size = stack.size();
        sigaltstack(&s, &old_stack);
        struct sigaction a{};
        a.sa_sigaction = on_signal;
        a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &a, &old[i]);
    }
    ~Signals()
    {
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &old[i], nullptr);
        sigaltstack(&old_stack, nullptr);
    }
};

constexpr size_t STACK = 64 << 10;

inline void run_block(bool descending)
{
    const unsigned n = (unsigned)fibers.size();
    ++block_number;
    for (auto& f : fibers) f.state = READY, f.rounds = 0;
    for (auto& w : warps) w.arrived = 0, w.alive = 32;
    for (;;) {
        bool ran = false;
        unsigned done = 0, waiting = 0;
        for (unsigned i = 0; i < n; ++i) {
            const unsigned t = descending ? n - 1 - i : i;
            if (fibers[t].state == READY) {
                ran = true;
                resume(t);
                if (fibers[t].state == DONE) --warps[t / 32].alive;
            }
        }
        for (auto& f : fibers) done += f.state == DONE, waiting += f.state == AT_BARRIER;
        if (done == n) return;
        if (!ran) {
            if (waiting && done + waiting == n) {
#ifndef RETURNED_THREADS_MISS_BARRIERS
                if (done) fail("a barrier of which some threads have returned");
#endif
                for (auto& f : fibers) f.state = READY;
            } else
                fail("a barrier or a warp operation that some threads never reach");
        }
    }
}

inline int launch(void (*fn)(void*), void* arguments, const unsigned* grid, const unsigned* block, size_t shared,
                  long long first, long long last, int descending)
{
    const unsigned n = block[0] * block[1] * block[2];
    const Signals signals;
    body = fn;
    body_arguments = arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    dynamic_size = shared;
    char* stacks = (char*)mmap(nullptr, STACK * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fibers.assign(n, Fiber());
    warps.assign((n + 31) / 32, Warp());
    for (unsigned t = 0; t < n; ++t) {
        Fiber& f = fibers[t];
        f.index = {t % block[0], t / block[0] % block[1], t / (block[0] * block[1])};
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = stacks + STACK * t;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, fiber_main, 0);
    }
    message[0] = 0;
    if (!sigsetjmp(rescue, 1))
        for (long long b = first; b < last; ++b) {
            blockIdx = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]),
                        (unsigned)(b / ((long long)grid[0] * grid[1]))};
            run_block(descending);
        }
    munmap(stacks, STACK * n);
    return message[0] != 0;
}

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** a, std::index_sequence<I...>)
{
    kernel(*static_cast<std::remove_reference_t<P>*>(a[I])...);
}
// What a parameter is, for the check of what is passed: a letter and its size.
template <class P>
constexpr char kind_of()
{
    if (std::is_pointer_v<P>) return 'p';
    if (std::is_same_v<P, bool>) return 'b';
    if (std::is_floating_point_v<P>) return 'f';
    return std::is_signed_v<P> ? 'i' : 'u';
}
template <auto kernel>
struct Entry;
template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
    static const char* signature()
    {
        static const char text[] = {kind_of<P>()..., 0};
        return text;
    }
    static const unsigned char* sizes()
    {
        static const unsigned char found[] = {(unsigned char)sizeof(P)...};
        return found;
    }
    static void run(void* a) { call(kernel, (void**)a, std::index_sequence_for<P...>()); }
};

}  // namespace emulation

#define SHARED(type, name, count)          \
    static emulation::Shared name##_store; \
    auto* name = static_cast<type*>(name##_store.get(sizeof(type) * (count)))
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulation::dynamic.get(emulation::dynamic_size))

#define KERNEL(number, ...)                                                                                             \
    extern "C" int launch_##number(void** a, const unsigned* grid, const unsigned* block, size_t shared, long long first, \
                                   long long last, int descending)                                                      \
    {                                                                                                                   \
        return emulation::launch(emulation::Entry<&__VA_ARGS__>::run, a, grid, block, shared, first, last, descending); \
    }                                                                                                                   \
    extern "C" const char* signature_##number() { return emulation::Entry<&__VA_ARGS__>::signature(); }                 \
    extern "C" const unsigned char* sizes_##number() { return emulation::Entry<&__VA_ARGS__>::sizes(); }

extern "C" const char* launch_message() { return emulation::message; }

inline void __syncthreads()
{
    emulation::fibers[emulation::current].state = emulation::AT_BARRIER;
    emulation::yield();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::exchange(emulation::SYNC, mask, 0, 0); }
inline unsigned lane_of_thread() { return emulation::current % 32; }
template <class T>
T __shfl_sync(unsigned mask, T v, int lane)
{
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask)
{
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane_of_thread() ^ lane_mask);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta)
{
    const unsigned lane = lane_of_thread();
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane < delta ? lane : lane - delta);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta)
{
    const unsigned lane = lane_of_thread();
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane + delta > 31 ? lane : lane + delta);
}
inline unsigned __ballot_sync(unsigned mask, bool p)
{
    unsigned out = 0;
    emulation::exchange(emulation::BALLOT, mask, p, 0);
    const auto& f = emulation::fibers[emulation::current];
    const auto& w = emulation::warps[emulation::current / 32];
    for (unsigned i = 0; i < 32; ++i) out |= (unsigned)(w.slots[(f.rounds - 1) & 1][i][0] & 1) << i;
    return out;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
inline double __longlong_as_double(long long u) { double x; std::memcpy(&x, &u, 8); return x; }
inline long long __double_as_longlong(double x) { long long u; std::memcpy(&u, &x, 8); return u; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

template <class T>
T atomicAdd(T* p, T v) { T old = *p; *p = (T)(old + v); return old; }
template <class T>
T atomicMax(T* p, T v) { T old = *p; *p = old > v ? old : v; return old; }
template <class T>
T atomicMin(T* p, T v) { T old = *p; *p = old < v ? old : v; return old; }
template <class T>
T atomicCAS(T* p, T compare, T v) { T old = *p; if (old == compare) *p = v; return old; }

using std::exp;
using std::log;
using std::sqrt;
using std::fma;
