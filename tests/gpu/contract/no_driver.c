#include <stdlib.h>

/* A driver without a device, and a runtime that says there is one: as much of both as cuDNN asks for while it plans. */
#define DONE(name) int name(void) { return 0; }
#define GIVES(name) int name(void **out) { *out = &thing; return 0; }
static int thing;

int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "no driver"; return 0; }
GIVES(cuCtxGetCurrent) GIVES(cuLibraryLoadData) GIVES(cuLibraryGetKernel) GIVES(cuKernelGetFunction)
GIVES(cuModuleLoadData) GIVES(cuModuleGetFunction)
DONE(cuModuleUnload) DONE(cuCtxGetLimit) DONE(cuCtxPopCurrent) DONE(cuCtxPushCurrent) DONE(cuStreamGetCtx)
DONE(cuLinkCreate) DONE(cuLinkAddData) DONE(cuLinkComplete) DONE(cuLinkDestroy) DONE(cuLaunchKernel)
DONE(cuLaunchKernelEx) DONE(cuLaunchCooperativeKernel) DONE(cuLibraryLoadFromFile) DONE(cuLibraryUnload)
DONE(cuKernelSetAttribute) DONE(cuKernelGetAttribute) DONE(cuOccupancyMaxPotentialClusterSize)
DONE(cuTensorMapEncodeTiled) DONE(cuTensorMapEncodeIm2col)

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetAttribute(int *value, int which) { *value = which == 75 ? atoi(getenv("MAJOR")) : 0; return 0; }
const char *cudaGetErrorString(int error) { return "no driver"; }
DONE(cudaGetLastError) DONE(cudaGetDeviceProperties) DONE(cudaGetDeviceProperties_v2)
