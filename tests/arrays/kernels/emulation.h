// CUDA's execution model for a C++ compiler, so that the kernels' own sources run on a CPU.
//
// Each CUDA thread is a fiber. The fibers of a block run one after another, in ascending or descending order of their numbers,
// until each waits: at a barrier, or in an exchange of its warp. What is read from shared memory before it was written is NaN,
// so that a missing barrier shows in one order or the other. An access outside of what the test mapped, a misaligned vector,
// more threads than the launch bounds and a barrier that not all threads reach end the launch with an error that names the thread.
//
// With a seed several blocks are in flight, threads come in random order and stop at any access of memory, and at most atomic
// operations. Compiled with -fsanitize=thread, each access is looked at: two threads that touch a byte with nothing that puts
// one before the other, one of them writing and not both atomically, are a race, which is an error too.
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
#include <unordered_map>
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

// The emulation itself is neither watched nor checked, and optimized where kernels are not: it takes most of the time.
#define OWN __attribute__((no_sanitize("thread", "alignment", "shift", "integer-divide-by-zero", "signed-integer-overflow")))
#define UNSEEN OWN __attribute__((noinline))
#pragma GCC push_options
#pragma GCC optimize("O2")

namespace emulation {

OWN inline float from_half(unsigned short b)
{
    _Float16 h;
    std::memcpy(&h, &b, 2);
    return (float)h;
}
OWN inline unsigned short to_half(float x)
{
    const _Float16 h = (_Float16)x;
    unsigned short b;
    std::memcpy(&b, &h, 2);
    return b;
}

struct Copy {  // of 16 bytes, or of zeros; made when its thread waits for it
    void* to;
    const void* from;
    unsigned group;
};
enum State { READY, AT_BARRIER, IN_WARP, DONE };
enum Kind { NONE, SHUFFLE, BALLOT, SYNC };

struct Fiber {
    ucontext_t start;
    sigjmp_buf at;
    bool begun = false;
    State state = DONE;
    unsigned rounds = 0;  // exchanges of the warp so far: the parity says which set of slots is in use
    unsigned syncs = 0;   // and those of them that order memory
    Index index;
    Copy copies[64];
    unsigned under_way = 0;  // of them
    unsigned groups = 0;     // that were closed
};
struct Warp {
    unsigned char slots[2][32][16];
    unsigned arrived = 0, alive = 0;
    Kind kind = NONE;
};
struct Block {
    Index index;
    unsigned number = 0, barriers = 0, done = 0, waiting = 0;
};

constexpr size_t STACK = 64 << 10;
constexpr unsigned IN_FLIGHT = 3;  // blocks at most, with a seed
template <class T>
struct Row {  // a vector that costs no calls where nothing is optimized
    T* first = nullptr;
    size_t count = 0;
    OWN void assign(size_t n)
    {
        delete[] first;
        first = new T[count = n]();
    }
    OWN T& operator[](size_t i) { return first[i]; }
    OWN size_t size() const { return count; }
};
static Row<Fiber> fibers;  // of the blocks in flight, one block after another, each in whole warps
static Row<Warp> warps;
static Row<Block> blocks;
static unsigned current, width;  // of `fibers`: the one that runs, and how many a block has
static sigjmp_buf scheduler, rescue;
static void (*body)(void*);
static void* body_arguments;
static char message[256];
static char* stacks;
static size_t stack_bytes;
static unsigned block_number;  // of this process: shared memory belongs to one block
static unsigned long long chance;  // the state of the random numbers, 0 without a seed
static bool watching;  // a seed was given, and the code of a kernel runs, not that of this file

OWN inline Block& block_of_thread() { return blocks[current / width]; }

OWN inline unsigned random_below(unsigned n)
{
    chance = chance * 6364136223846793005ULL + 1442695040888963407ULL;
    return (unsigned)((chance >> 32) * n >> 32);
}

struct Unwatched {
    UNSEEN Unwatched() { watching = false; }
    UNSEEN ~Unwatched() { watching = chance != 0; }
};

[[noreturn]] OWN inline void fail(const char* what)
{
    std::snprintf(message, sizeof message, "%s in thread (%u, %u, %u) of block (%u, %u, %u)", what, threadIdx.x,
                  threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    siglongjmp(rescue, 1);
}

OWN inline void yield()
{
    Fiber& f = fibers[current];
    if (!sigsetjmp(f.at, 0)) siglongjmp(scheduler, 1);
}

UNSEEN inline void fiber_main()
{
    for (;;) {
        watching = chance != 0;
        body(body_arguments);
        watching = false;
        fibers[current].state = DONE;
        yield();
    }
}

OWN inline void resume(unsigned t)
{
    Fiber& f = fibers[t];
    current = t;
    threadIdx = f.index;
    blockIdx = block_of_thread().index;
    if (!sigsetjmp(scheduler, 0)) {
        if (f.begun) siglongjmp(f.at, 1);
        f.begun = true;
        setcontext(&f.start);
    }
}

OWN inline void forget(const void* address, size_t n);

// Shared memory of one declaration: fresh, and full of NaN, in each block. (Nothing is made when it is first met: that would be a race.)
struct Shared {
    struct {
        unsigned char* bytes;
        size_t size;
        unsigned owner;
    } parts[IN_FLIGHT];
    OWN void* get(size_t n)
    {
        const Unwatched here;
        auto& p = parts[current / width];
        if (p.owner != block_of_thread().number || p.size < n) {
            p.bytes = (unsigned char*)std::realloc(p.bytes, n + 16);
            std::memset(p.bytes, 0xff, n + 16);
            p.size = n;
            p.owner = block_of_thread().number;
            forget(p.bytes, n + 16);
        }
        return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p.bytes) + 15) & ~uintptr_t(15));
    }
};
static Shared dynamic;
static size_t dynamic_size;

template <class T>
OWN T exchange(Kind kind, unsigned mask, T value, unsigned source_lane)
{
    static_assert(sizeof(T) <= 16, "a shuffle moves up to 16 bytes");
    const Unwatched here;
    if (mask != 0xffffffffu) fail("a warp operation without the whole warp");
    Fiber& f = fibers[current];
    Warp& w = warps[current / 32];
    const unsigned lane = current % 32, set = f.rounds++ & 1;
    if (w.alive != 32) fail("a warp operation of which some lanes have returned");
    if (w.arrived == 0) w.kind = kind;
    if (w.kind != kind) fail("different warp operations in one warp");
    f.syncs += kind == SYNC;
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

// The values of all lanes of a warp.
template <class T>
OWN void of_all_lanes(const T& value, T (&out)[32])
{
    exchange(SHUFFLE, 0xffffffffu, value, 0);
    const Unwatched here;
    const Warp& w = warps[current / 32];
    for (unsigned i = 0; i < 32; ++i) std::memcpy(&out[i], w.slots[(fibers[current].rounds - 1) & 1][i], sizeof value);
}

OWN inline void copy_later(void* to, const void* from)
{
    Fiber& f = fibers[current];
    if (((uintptr_t)to | (uintptr_t)from) % 16) fail("a misaligned copy");
    if (f.under_way == 64) fail("more copies under way than the emulation keeps");
    f.copies[f.under_way++] = Copy{to, from, f.groups};
}
OWN inline void close_copies() { ++fibers[current].groups; }

OWN inline void on_signal(int signal, siginfo_t*, void*)
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

// ----- races -----------------------------------------------------------------------------------------------------------

struct Access {
    unsigned block = 0, thread = 0, barriers = 0, syncs = 0;
    OWN bool before(const Access& o) const  // whether something puts it before a later one
    {
        return block == o.block && (thread == o.thread || barriers != o.barriers || (thread / 32 == o.thread / 32 && syncs != o.syncs));
    }
};
enum Readers : unsigned { NOBODY, ONE_THREAD, ONE_WARP, ONE_BLOCK, MANY_BLOCKS };
struct Byte {
    Access write, read;
    unsigned atomic = false;  // whether the last write was
    Readers readers = NOBODY;  // since what the last write waited for; `read` is one of them
    OWN bool operator==(const Byte& o) const
    {
        static_assert(sizeof(Byte) == 40, "no gaps");
        unsigned long long a[5], b[5];
        std::memcpy(a, this, 40), std::memcpy(b, &o, 40);
        return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) | (a[4] ^ b[4]));
    }
};
static std::unordered_map<uintptr_t, std::vector<Byte>> memory;  // by pages
static uintptr_t last_page;  // that was looked for, and its bytes
static Byte* bytes;

OWN inline Byte& byte_at(uintptr_t p)
{
    if (!bytes || last_page != p >> 12) {
        auto& page = memory[last_page = p >> 12];
        if (page.empty()) page.resize(4096);
        bytes = page.data();
    }
    return bytes[p & 4095];
}
OWN inline void forget(const void* address, size_t n)
{
    for (size_t i = 0; chance && i < n; ++i) byte_at((uintptr_t)address + i) = Byte();
}

// Whether all that has read a byte comes before `now`.
OWN inline bool read_before(const Byte& b, const Access& now)
{
    Access any = b.read;
    if (b.readers >= ONE_WARP) any.thread = b.readers == ONE_WARP && any.thread / 32 == now.thread / 32 ? now.thread ^ 1 : ~0u;
    return b.readers == NOBODY || (b.readers < MANY_BLOCKS && any.before(now));
}

// What an access leaves of a byte.
OWN inline Byte after(Byte b, const Access& now, bool write, bool atomic)
{
    const bool after_write = !b.write.block || b.write.before(now) || (atomic && b.atomic), after_reads = read_before(b, now);
    if (!after_write || (write && !after_reads)) {
        const Access& other = after_write ? b.read : b.write;
        char text[96];
        std::snprintf(text, sizeof text, "a race with thread %u of its block%s", other.thread,
                      other.block == now.block ? "" : ", which is another one,");
        fail(text);
    }
    if (write) {
        b.write = now, b.atomic = atomic, b.readers = NOBODY;
        return b;
    }
    if (after_reads) b.readers = ONE_THREAD;
    else {
        const bool block = b.read.block == now.block, warp = block && b.read.thread / 32 == now.thread / 32;
        const Readers all = warp ? ONE_WARP : block ? ONE_BLOCK : MANY_BLOCKS;
        if (b.readers < all) b.readers = all;
    }
    b.read = now;
    return b;
}

UNSEEN inline void look_at(const void* address, size_t n, bool write, bool atomic)
{
    const uintptr_t start = (uintptr_t)address;
    if (start - (uintptr_t)stacks < stack_bytes) return;
    if (address == &threadIdx || address == &blockIdx || address == &blockDim || address == &gridDim) return;
    const Unwatched here;
    const Access now{block_of_thread().number, current % width, block_of_thread().barriers, fibers[current].syncs};
    Byte before, then;
    for (uintptr_t p = start; p < start + n; ++p) {  // most bytes of an element have one story
        Byte& b = byte_at(p);
        if (p == start || !(b == before)) before = b, then = after(b, now, write, atomic);
        b = then;
    }
    if (random_below(atomic ? 2 : 32) == 0) yield();
}
OWN inline void access(const void* address, size_t n, bool write, bool atomic)
{
    if (watching) look_at(address, n, write, atomic);
}
UNSEEN inline void atomically(const void* p, size_t n) { access(p, n, true, true); }

// Those of closed groups but for the last ones; with -1, all.
OWN inline void wait_for_copies(int but = -1)
{
    Fiber& f = fibers[current];
    unsigned n = 0;
    while (n < f.under_way && (but < 0 || (int)(f.groups - f.copies[n].group) > but)) ++n;
    for (unsigned i = 0; i < n; ++i) {
        const Copy c = f.copies[i];
        if (c.from) access(c.from, 16, false, false);
        access(c.to, 16, true, false);
        const Unwatched here;
        if (c.from) std::memcpy(c.to, c.from, 16);
        else std::memset(c.to, 0, 16);
    }
    std::memmove(f.copies, f.copies + n, (f.under_way -= n) * sizeof(Copy));
}

// ----- launches --------------------------------------------------------------------------------------------------------

OWN inline void bound_threads(unsigned most, unsigned = 0)
{
    if (blockDim.x * blockDim.y * blockDim.z > most) fail("more threads than the launch bounds");
}

OWN inline void run_blocks(long long next, long long last, bool descending)
{
    const unsigned n = blockDim.x * blockDim.y * blockDim.z, total = (unsigned)fibers.size();
    unsigned alive = 0;
    const auto begin = [&](unsigned slot) {
        if (next == last) return;
        blocks[slot] = Block{{(unsigned)(next % gridDim.x), (unsigned)(next / gridDim.x % gridDim.y),
                              (unsigned)(next / ((long long)gridDim.x * gridDim.y))}, ++block_number};
        for (unsigned t = 0; t < n; ++t) fibers[slot * width + t].state = READY, fibers[slot * width + t].rounds = 0;
        for (unsigned w = 0; w < width / 32; ++w) warps[slot * width / 32 + w].arrived = 0, warps[slot * width / 32 + w].alive = 32;
        ++next, ++alive;
    };
    for (unsigned slot = 0; slot < blocks.size(); ++slot) begin(slot);
    unsigned idle = 0;
    for (unsigned at = descending ? total - 1 : 0; alive;) {
        if (fibers[at].state == READY) {
            idle = 0;
            resume(at);
            const unsigned slot = at / width;
            Block& b = blocks[slot];
            if (fibers[at].state == DONE && fibers[at].under_way) fail("a copy that nothing waits for");
            if (fibers[at].state == DONE) --warps[at / 32].alive, ++b.done;
            if (fibers[at].state == AT_BARRIER) ++b.waiting;
            if (b.done == n) {
                --alive;
                begin(slot);
            } else if (b.waiting && b.done + b.waiting == n) {
#ifndef RETURNED_THREADS_MISS_BARRIERS
                if (b.done) fail("a barrier of which some threads have returned");
#endif
                for (unsigned t = 0; t < n; ++t)
                    if (fibers[slot * width + t].state == AT_BARRIER) fibers[slot * width + t].state = READY;
                b.waiting = 0, ++b.barriers;
            }
        } else if (++idle > total)
            fail("a barrier or a warp operation that some threads never reach");
        // Now and then from anywhere on; else the next one, which is seldom far.
        if (chance && !idle && random_below(8) == 0) at = random_below(total);
        else if (descending) at = (at ? at : total) - 1;
        else at = at + 1 == total ? 0 : at + 1;
    }
}

OWN inline int launch(void (*fn)(void*), void* arguments, const unsigned* grid, const unsigned* block, size_t shared,
                  long long first, long long last, int descending, unsigned long long seed = 0)
{
    const unsigned n = block[0] * block[1] * block[2];
    const Signals signals;
    body = fn;
    body_arguments = arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    dynamic_size = shared;
    chance = seed;
    memory.clear();
    bytes = nullptr;
    width = (n + 31) / 32 * 32;
    const long long in_flight = seed ? IN_FLIGHT : 1;
    blocks.assign(last - first < in_flight ? last - first : in_flight);
    fibers.assign(width * blocks.size());
    warps.assign(fibers.size() / 32);
    stack_bytes = STACK * fibers.size();
    stacks = (char*)mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < fibers.size(); ++i) {
        Fiber& f = fibers[i];
        const unsigned t = i % width;
        f.index = {t % block[0], t / block[0] % block[1], t / (block[0] * block[1])};
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = stacks + STACK * i;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, fiber_main, 0);
    }
    message[0] = 0;
    if (!sigsetjmp(rescue, 1)) run_blocks(first, last, descending);
    watching = false;
    munmap(stacks, stack_bytes);
    return message[0] != 0;
}

#pragma GCC pop_options

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
                                   long long last, int descending, unsigned long long seed)                              \
    {                                                                                                                   \
        return emulation::launch(emulation::Entry<&__VA_ARGS__>::run, a, grid, block, shared, first, last, descending, seed); \
    }                                                                                                                   \
    extern "C" const char* signature_##number() { return emulation::Entry<&__VA_ARGS__>::signature(); }                 \
    extern "C" const unsigned char* sizes_##number() { return emulation::Entry<&__VA_ARGS__>::sizes(); }

extern "C" const char* launch_message() { return emulation::message; }

#pragma GCC push_options
#pragma GCC optimize("O2")
OWN inline void __syncthreads()
{
    const emulation::Unwatched here;
    emulation::fibers[emulation::current].state = emulation::AT_BARRIER;
    emulation::yield();
}
OWN inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::exchange(emulation::SYNC, mask, 0, 0); }
OWN inline unsigned lane_of_thread() { return emulation::current % 32; }
template <class T>
OWN T __shfl_sync(unsigned mask, T v, int lane)
{
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane);
}
template <class T>
OWN T __shfl_xor_sync(unsigned mask, T v, int lane_mask)
{
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane_of_thread() ^ lane_mask);
}
template <class T>
OWN T __shfl_up_sync(unsigned mask, T v, unsigned delta)
{
    const unsigned lane = lane_of_thread();
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane < delta ? lane : lane - delta);
}
template <class T>
OWN T __shfl_down_sync(unsigned mask, T v, unsigned delta)
{
    const unsigned lane = lane_of_thread();
    return emulation::exchange(emulation::SHUFFLE, mask, v, lane + delta > 31 ? lane : lane + delta);
}
OWN inline unsigned __ballot_sync(unsigned mask, bool p)
{
    unsigned out = 0;
    emulation::exchange(emulation::BALLOT, mask, p, 0);
    const emulation::Unwatched here;
    const auto& f = emulation::fibers[emulation::current];
    const auto& w = emulation::warps[emulation::current / 32];
    for (unsigned i = 0; i < 32; ++i) out |= (unsigned)(w.slots[(f.rounds - 1) & 1][i][0] & 1) << i;
    return out;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
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

#define ATOMIC(name, ...)                             \
    template <class T>                                \
    T name                                            \
    {                                                 \
        emulation::atomically(p, sizeof(T));          \
        const emulation::Unwatched here;              \
        const T old = *p;                             \
        __VA_ARGS__;                                  \
        return old;                                   \
    }
ATOMIC(atomicAdd(T* p, T v), *p = (T)(old + v))
ATOMIC(atomicMax(T* p, T v), *p = old > v ? old : v)
ATOMIC(atomicMin(T* p, T v), *p = old < v ? old : v)
ATOMIC(atomicCAS(T* p, T compare, T v), if (old == compare) *p = v)

// The calls that -fsanitize=thread puts before each access.
#define SEEN(name, n, write) \
    extern "C" UNSEEN void __tsan_##name(void* p) { emulation::access(p, n, write, false); }
#define SEEN_OF(n)            \
    SEEN(read##n, n, false)   \
    SEEN(write##n, n, true)   \
    SEEN(unaligned_read##n, n, false) \
    SEEN(unaligned_write##n, n, true)
SEEN_OF(1) SEEN_OF(2) SEEN_OF(4) SEEN_OF(8) SEEN_OF(16)
extern "C" UNSEEN void __tsan_read_range(void* p, unsigned long n) { emulation::access(p, n, false, false); }
extern "C" UNSEEN void __tsan_write_range(void* p, unsigned long n) { emulation::access(p, n, true, false); }
extern "C" void __tsan_init() {}

#pragma GCC pop_options

using std::exp;
using std::log;
using std::log1p;
using std::cos;
using std::sin;
using std::sqrt;
using std::fma;
