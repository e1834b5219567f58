/* A CUDA runtime and driver without a device: memory of the host stands for that of the device, kernels do nothing, and every call that a test
   may count is noted with its stream and its size. A stream knows whether it is captured, and refuses then what CUDA refuses. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u;
typedef struct { const char *what; u stream, size; } call;
enum { DEVICES = 2, KEPT = 1 << 16, INVALID = 1, NO_MEMORY = 2, LAUNCH_FAILED = 719 };
enum { UNSUPPORTED_IN_CAPTURE = 900, INVALIDATED = 901, ACROSS_A_CAPTURE = 905, IMPLICIT_IN_CAPTURE = 906, CAPTURED_EVENT = 907 };

call calls[KEPT];
u called = 0;
int fill = 0; /* the byte that new memory is full of */
static __thread int device = 0;
u limit = 2ULL << 30; /* bytes of a device */
static u held[DEVICES];

/* Answers a library's function, with the address of its arguments: its status, or -1 to do nothing. */
int (*library)(const char *name, u *arguments) = 0;

void note(const char *what, u stream, u size) {
    u i = __atomic_fetch_add(&called, 1, __ATOMIC_RELAXED) % KEPT;
    calls[i] = (call){what, stream, size};
}

/* ----- what a graph holds: launches, whose arguments are kept after their addresses, and, without a kernel, copies and fills of memory and
   calls of libraries ----- */
typedef struct { int (*start)(void **, const unsigned *, const unsigned *, u); const unsigned *bytes; const char *(*message)(void); } kernel;
typedef struct node {
    struct node *next;
    const kernel *f;
    unsigned grid[3], block[3];
    u shared, n;
    int value;
    u call; /* the number of a library's call, and 1 */
    char replay[32]; /* that library's function which makes it */
    void *to;
    const void *from;
    void *arguments[];
} node;
typedef struct { node *first, *last; } graph;

static graph *new_graph(void) { return calloc(1, sizeof(graph)); }
static node *append(graph *g, u more) {
    node *x = calloc(1, sizeof(node) + more);
    if (g->last) g->last->next = x; else g->first = x;
    return g->last = x;
}

/* ----- streams: 0, 1 and 2 are CUDA's own, the others point at what they are. While one is captured, CUDA refuses to wait for it, for its
   device and for an event that is recorded in it, to have it wait for an event from outside, and, where it is a stream that waits for stream 0,
   to use that one. What it refuses ends the capture: nothing more is taken, and there is no graph. ----- */
typedef struct stream { int capturing, broken, device, non_blocking; u id; graph *made; struct stream *next; } stream;
typedef struct { u capture; int recorded; } event;
static stream *open_captures = 0;
static u captures = 0;
static pthread_mutex_t capturing = PTHREAD_MUTEX_INITIALIZER;

int captured(u s) { return s > 2 && ((stream *)s)->capturing; }
/* Ends the captures of this number, or, where it is 0, those on this device, or those of them that wait for stream 0: how many. */
static int broken(u id, int blocking) {
    int found = 0;
    pthread_mutex_lock(&capturing);
    for (stream *c = open_captures; c; c = c->next)
        if (id ? c->id == id : c->device == device && !(blocking && c->non_blocking)) c->broken = 1, ++found;
    pthread_mutex_unlock(&capturing);
    return found;
}
static int refused(u s) {
    if (captured(s)) return ((stream *)s)->broken ? INVALIDATED : 0;
    return s < 2 && open_captures && broken(0, 1) ? IMPLICIT_IN_CAPTURE : 0;
}
static int wait(u s) {
    if (captured(s)) { ((stream *)s)->broken = 1; return UNSUPPORTED_IN_CAPTURE; }
    int no = refused(s);
    if (no) return no;
    note("wait", s, 0);
    return 0;
}
int keep_call(const char *of, const char *function, u s, u *arguments) {
    char name[64];
    snprintf(name, sizeof name, "%s%sCapture", of, function);
    int failed = library ? library(name, arguments) : 0;
    if (library && !failed) {
        node *x = append(((stream *)s)->made, 0);
        x->call = arguments[0] + 1;
        snprintf(x->replay, sizeof x->replay, "%sReplay", of);
    }
    return failed;
}
int fake_cudaStreamCreateWithFlags(u *s, unsigned flags) {
    stream *made = calloc(1, sizeof(stream));
    made->device = device, made->non_blocking = flags & 1;
    *s = (u)made;
    return 0;
}
int fake_cudaStreamCreate(u *s) { return fake_cudaStreamCreateWithFlags(s, 0); }
int fake_cudaStreamCreateWithPriority(u *s, unsigned flags) { return fake_cudaStreamCreateWithFlags(s, flags); }
int fake_cudaStreamSynchronize(u s) { return wait(s); }
int fake_cudaStreamQuery(u s) { return captured(s) ? wait(s) : 0; }
int fake_cudaStreamWaitEvent(u s, event *e) {
    if (captured(s) && e->recorded && e->capture != ((stream *)s)->id) {
        ((stream *)s)->broken = 1;
        return ACROSS_A_CAPTURE;
    }
    note("order", s, (u)e);
    return 0;
}
int fake_cudaStreamGetPriority(u s, int *p) { *p = 0; return 0; }
int fake_cudaStreamIsCapturing(u s, int *state) { *state = captured(s); return 0; }
int fake_cudaStreamBeginCapture(stream *s) {
    if ((u)s <= 2 || s->capturing) return INVALID;
    pthread_mutex_lock(&capturing);
    s->capturing = 1, s->broken = 0, s->id = ++captures, s->made = new_graph(), s->next = open_captures;
    open_captures = s;
    pthread_mutex_unlock(&capturing);
    return 0;
}
int fake_cudaStreamEndCapture(stream *s, u *graph) {
    pthread_mutex_lock(&capturing);
    stream **at = &open_captures;
    while (*at && *at != s) at = &(*at)->next;
    if (*at) *at = s->next;
    pthread_mutex_unlock(&capturing);
    s->capturing = 0;
    *graph = s->broken ? 0 : (u)s->made;
    return s->broken ? INVALIDATED : 0;
}
int fake_cudaGraphInstantiate(u *exec, u graph) { *exec = graph; return 0; }
static int run(const kernel *, void **, const unsigned *, const unsigned *, u);
int fake_cudaGraphLaunch(graph *g, u s) {
    note("graph", s, (u)g);
    for (node *x = g->first; x; x = x->next) {
        int failed = 0;
        if (x->f) failed = run(x->f, x->arguments, x->grid, x->block, x->shared);
        else if (x->call) failed = library(x->replay, (u[]){x->call - 1});
        else if (x->from) memmove(x->to, x->from, x->n);
        else memset(x->to, x->value, x->n);
        if (failed) return failed;
    }
    return 0;
}
int fake_cudaDeviceSynchronize(void) { return broken(0, 0) ? UNSUPPORTED_IN_CAPTURE : wait(0); }
int fake_cudaEventCreate(u *e) { *e = (u)calloc(1, sizeof(event)); return 0; }
int fake_cudaEventCreateWithFlags(u *e) { return fake_cudaEventCreate(e); }
int fake_cudaEventRecord(event *e, u s) {
    *e = (event){captured(s) ? ((stream *)s)->id : 0, 1};
    note("record", s, (u)e);
    return 0;
}
int fake_cudaEventQuery(event *e) { return e->capture ? broken(e->capture, 0), CAPTURED_EVENT : 0; }
int fake_cudaEventSynchronize(event *e) {
    if (e->capture) return fake_cudaEventQuery(e);
    note("wait", 0, (u)e);
    return 0;
}
int fake_cudaEventElapsedTime(float *t) { *t = 1; return 0; }

/* ----- devices ----- */
int fake_cudaGetDevice(int *d) { *d = device; return 0; }
int fake_cudaSetDevice(int d) { if (d < 0 || d >= DEVICES) return 101; device = d; return 0; }
int fake_cudaGetDeviceCount(int *n) { *n = DEVICES; return 0; }
int fake_cudaDriverGetVersion(int *v) { *v = 13020; return 0; }
int fake_cudaRuntimeGetVersion(int *v) { *v = 13020; return 0; }
int fake_cudaDeviceCanAccessPeer(int *yes) { *yes = 1; return 0; }
int fake_cudaDeviceGetAttribute(int *v, int which) {
    switch (which) {
    case 1: *v = 1024; break;     /* threads of a block */
    case 8: *v = 49152; break;    /* shared memory of a block */
    case 10: *v = 32; break;      /* threads of a warp */
    case 16: *v = 132; break;     /* multiprocessors */
    case 39: *v = 2048; break;    /* threads of a multiprocessor */
    case 75: *v = 9; break;       /* compute capability, major and minor */
    case 76: *v = 0; break;
    case 81: *v = 233472; break;  /* shared memory of a multiprocessor */
    case 97: *v = 232448; break;  /* shared memory of a block that asks for it */
    default: *v = 1;
    }
    return 0;
}
int fake_cudaGetDeviceProperties(char *p, int d) {
    memset(p, 0, 1008);
    strcpy(p, "no device");
    p[256] = d + 1; /* the identity */
    *(u *)(p + 288) = 80ULL << 30;
    *(u *)(p + 296) = 49152;                       /* shared memory of a block */
    *(int *)(p + 308) = 32;                        /* threads of a warp */
    *(int *)(p + 320) = 1024;                      /* threads of a block */
    *(int *)(p + 360) = 9;                         /* compute capability */
    return 0;
}
static const char *text = "an error of the fake runtime";
const char *fake_cudaGetErrorName(int e) { return e == NO_MEMORY ? "cudaErrorMemoryAllocation" : text; }
const char *fake_cudaGetErrorString(int e) { return e == NO_MEMORY ? "out of memory" : text; }

/* ----- memory ----- */
int fake_cudaMalloc(void **p, u n) {
    *p = 0;
    int fits = n <= limit && __atomic_add_fetch(&held[device], n, __ATOMIC_RELAXED) <= limit;
    char *raw = fits ? calloc(n + 1024, 1) : 0, *aligned = (char *)(((u)raw + 1024) & ~511ULL);
    if (!raw) {
        if (n <= limit) __atomic_sub_fetch(&held[device], n, __ATOMIC_RELAXED);
        return NO_MEMORY;
    }
    ((u *)aligned)[-1] = (u)raw, ((u *)aligned)[-2] = n, ((u *)aligned)[-3] = device;
    if (fill) memset(aligned, fill, n);
    *p = aligned;
    note("malloc", 0, n);
    return 0;
}
int fake_cudaMallocAsync(void **p, u n, u s) { return fake_cudaMalloc(p, n); }
int fake_cudaHostAlloc(void **p, u n) { return posix_memalign(p, 512, n ? n : 1) ? NO_MEMORY : 0; }
int fake_cudaFree(u *p) {
    if (p) __atomic_sub_fetch(&held[p[-3]], p[-2], __ATOMIC_RELAXED), free((void *)p[-1]);
    return 0;
}
int fake_cudaFreeAsync(u *p) { return fake_cudaFree(p); }
int fake_cudaFreeHost(void *p) { free(p); return 0; }
int fake_cudaMemGetInfo(u *free, u *total) { *free = limit - held[device]; *total = 80ULL << 30; return 0; }
static const char *kinds[] = {"h2h", "h2d", "d2h", "d2d", "d2d"};
int fake_cudaMemcpyAsync(void *to, const void *from, u n, int kind, u s) {
    int no = refused(s);
    if (no) return no;
    note(kinds[kind], s, n);
    if (captured(s)) {
        node *x = append(((stream *)s)->made, 0);
        x->to = to, x->from = from, x->n = n;
    } else
        memmove(to, from, n);
    return 0;
}
int fake_cudaMemcpy(void *to, const void *from, u n, int kind) {
    int no = refused(0);
    if (no) return no;
    note("wait", 0, 0);
    return fake_cudaMemcpyAsync(to, from, n, kind, 0);
}
int fake_cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, u n, u s) { return fake_cudaMemcpyAsync(to, from, n, 3, s); }
int fake_cudaMemsetAsync(void *p, int v, u n, u s) {
    int no = refused(s);
    if (no) return no;
    note("memset", s, n);
    if (captured(s)) {
        node *x = append(((stream *)s)->made, 0);
        x->to = p, x->value = v, x->n = n;
    } else
        memset(p, v, n);
    return 0;
}
int fake_cudaMemset(void *p, int v, u n) { return fake_cudaMemsetAsync(p, v, n, 0); }
struct attributes { int type, device; void *on_device, *on_host; };
int fake_cudaPointerGetAttributes(struct attributes *a, void *p) {
    *a = (struct attributes){2, device, p, 0};
    return 0;
}

/* ----- kernels ----- */
typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; u shared, s; } launch;
static __thread launch pushed; /* what <<<...>>> says, until the function that nvcc makes for the kernel asks for it */
int fake___cudaPushCallConfiguration(dim3 grid, dim3 block, u shared, u s) { pushed = (launch){grid, block, shared, s}; return 0; }
int fake___cudaPopCallConfiguration(dim3 *grid, dim3 *block, u *shared, u *s) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *s = pushed.s;
    return 0;
}
/* Code that CuPy was built with does nothing here: what it was to compute is not there. */
int fake_launch(void *kernel, dim3 grid, dim3 block, void **arguments, u shared, u s) { note("built-in", s, grid.x * (u)block.x); return 0; }
int fake_cudaLaunchKernelExC(launch *how) { note("built-in", how->s, how->grid.x * (u)how->block.x); return 0; }
int fake_occupancy(int *n) { *n = 8; return 0; }
int fake_cudaFuncGetAttributes(int *a) {
    memset(a, 0, 64);
    a[6] = 1024;        /* threads of a block at most */
    a[8] = a[9] = 90;   /* what it was compiled for */
    return 0;
}
int fake_nothing(void) { return 0; }

/* ----- driver ----- */
int cuInit(void) { return 0; }
int cuDeviceGetCount(int *n) { *n = DEVICES; return 0; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuCtxGetCurrent(u *c) { *c = 0x1000; return 0; }
int cuCtxSetCurrent(u c) { return 0; }
/* A module's code is "PATH PREFIX" of a library that g++ made, or the word "nothing". */
typedef struct { void *library; char prefix[64]; } module;
static const char *failure;
int cuModuleLoadData(module **m, const char *image) {
    *m = calloc(1, sizeof(module));
    const char *space = strchr(image, ' ');
    if (!space) return 0;
    char *path = strndup(image, space - image);
    (*m)->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    free(path);
    snprintf((*m)->prefix, sizeof (*m)->prefix, "%s", space + 1);
    if (!(*m)->library) failure = dlerror();
    return (*m)->library ? 0 : 200;
}
int cuModuleLoad(module **m) { return cuModuleLoadData(m, "nothing"); }
int cuModuleUnload(u m) { return 0; }
static void *of(module *m, const char *kind, const char *name) {
    char symbol[4096];
    snprintf(symbol, sizeof symbol, "%s_%s_%s", kind, m->prefix, name);
    return dlsym(m->library, symbol);
}
int cuModuleGetFunction(kernel **f, module *m, const char *name) {
    *f = calloc(1, sizeof(kernel));
    if (!m->library) return 0;
    const unsigned *(*bytes)(void) = of(m, "bytes", name);
    (*f)->start = of(m, "start", name);
    if (!bytes || !(*f)->start) return 500;
    (*f)->bytes = bytes();
    (*f)->message = dlsym(m->library, "launch_message");
    return 0;
}
static int run(const kernel *f, void **arguments, const unsigned *grid, const unsigned *block, u shared) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER; /* a kernel's threads and shared memory are variables of its library */
    pthread_mutex_lock(&one);
    int failed = f->start(arguments, grid, block, shared);
    if (failed) failure = f->message();
    pthread_mutex_unlock(&one);
    return failed ? LAUNCH_FAILED : 0;
}
int cuLaunchKernel(const kernel *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, u s, void **arguments) {
    int no = refused(s);
    if (no) return no;
    note("launch", s, gx * (u)bx);
    unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    if (!f->start) return 0;
    if (!captured(s)) return run(f, arguments, grid, block, shared);
    u count = 0, size = 0;
    for (; f->bytes[count]; ++count) size += (f->bytes[count] + 15) & ~15;
    node *x = append(((stream *)s)->made, count * 8 + 16 + size);
    memcpy(x->grid, grid, sizeof grid), memcpy(x->block, block, sizeof block);
    x->f = f, x->shared = shared;
    char *at = (char *)(((u)(x->arguments + count) + 15) & ~15ULL);
    for (u i = 0; i < count; at += (f->bytes[i] + 15) & ~15, ++i) x->arguments[i] = memcpy(at, arguments[i], f->bytes[i]);
    return 0;
}
int cuFuncGetAttribute(int *v, int which) { *v = which == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuGetErrorName(int e, const char **s) { *s = text; return 0; }
int cuGetErrorString(int e, const char **s) { *s = failure ? failure : text; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 4; return 0; }
int cuOccupancyMaxPotentialBlockSize(int *grid, int *block) { *grid = 132; *block = 256; return 0; }
