/* The calls of the CUDA driver that kvstore makes, on the host's memory: a region is a memfd, a mapping is a mapping. What a
   device would refuse is refused: wrong properties, memory without access, a thread without a context. It hangs in a call
   while a file of that call's name lies in the directory that KVSTORE_STAND_IN_HANGS names, and leaves CALL.hung there. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { int type, id; } location;
typedef struct {
    int type, handles;
    location where;
    void *windows;
    struct { unsigned char compression, direct; unsigned short usage; unsigned char reserved[4]; } flags;
} properties;
typedef struct { location where; int flags; } right;

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201 };
#define STEP (2ull << 20)
#define MOST (1ull << 33)
static int begun;
static __thread void *current;

static void hang(const char *call) {
    const char *directory = getenv("KVSTORE_STAND_IN_HANGS");
    char path[512];
    if (!directory) return;
    snprintf(path, sizeof path, "%s/%s", directory, call);
    if (access(path, F_OK)) return;
    char told[520];
    snprintf(told, sizeof told, "%s.hung", path);
    close(creat(told, 0600));
    while (!access(path, F_OK)) usleep(10000);
}

int cuInit(unsigned flags) {
    hang("cuInit");
    begun = 1;
    return flags ? INVALID : 0;
}
int cuDeviceGet(int *device, int ordinal) {
    if (!begun) return NOT_INITIALIZED;
    if (ordinal != 0) return 101;
    *device = 0;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 103;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(0x1000 + device); return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }

static int are_right(const properties *wanted) {
    return wanted->type == 1 && wanted->handles == 1 && wanted->where.type == 1 && wanted->where.id == 0 &&
           !wanted->windows && !wanted->flags.compression && !wanted->flags.usage;
}
int cuMemGetAllocationGranularity(size_t *step, const properties *wanted, int kind) {
    if (!are_right(wanted) || kind) return INVALID;
    *step = STEP;
    return 0;
}
int cuMemCreate(u64 *handle, size_t size, const properties *wanted, u64 flags) {
    if (!current) return NO_CONTEXT;
    if (!are_right(wanted) || size % STEP || flags) return INVALID;
    if (size > MOST) return OUT_OF_MEMORY;
    int memory = memfd_create("stand-in", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, size)) return OUT_OF_MEMORY;
    *handle = memory;
    return 0;
}
int cuMemRelease(u64 handle) { return close((int)handle) ? INVALID : 0; }
int cuMemExportToShareableHandle(int *out, u64 handle, int kind, u64 flags) {
    if (kind != 1 || flags) return INVALID;
    *out = dup((int)handle);
    return *out < 0;
}
int cuMemImportFromShareableHandle(u64 *handle, void *given, int kind) {
    int memory = kind == 1 ? dup((int)(intptr_t)given) : -1;
    if (memory < 0) return INVALID;
    *handle = memory;
    return 0;
}
int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 hint, u64 flags) {
    if (size % STEP || alignment || hint || flags) return INVALID;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (u64)(uintptr_t)found;
    return found == MAP_FAILED;
}
int cuMemAddressFree(u64 address, size_t size) { return munmap((void *)(uintptr_t)address, size); }
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    if (offset || flags) return INVALID;
    void *there = (void *)(uintptr_t)address;
    return mmap(there, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0) == there ? 0 : INVALID;
}
int cuMemUnmap(u64 address, size_t size) {
    hang("cuMemUnmap");
    void *there = (void *)(uintptr_t)address;
    return mmap(there, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != there;
}
int cuMemSetAccess(u64 address, size_t size, const right *given, size_t count) {
    if (count != 1 || given->where.type != 1 || given->where.id != 0 || given->flags != 3) return INVALID;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}
int cuStreamCreate(void **stream, unsigned flags) {
    if (!current || flags != 1) return INVALID;
    *stream = (void *)(uintptr_t)0x77;
    return 0;
}
static int is_ready(void *stream) { return current ? (stream == (void *)(uintptr_t)0x77 ? 0 : INVALID) : NO_CONTEXT; }
int cuMemcpyHtoDAsync_v2(u64 target, const void *source, size_t size, void *stream) {
    hang("cuMemcpyHtoDAsync_v2");
    int status = is_ready(stream);
    if (!status) memcpy((void *)(uintptr_t)target, source, size);
    return status;
}
int cuMemcpyDtoHAsync_v2(void *target, u64 source, size_t size, void *stream) {
    int status = is_ready(stream);
    if (!status) memcpy(target, (void *)(uintptr_t)source, size);
    return status;
}
int cuStreamSynchronize(void *stream) { return is_ready(stream); }
int cuGetErrorString(int status, const char **words) {
    *words = status == OUT_OF_MEMORY ? "out of memory" : "refused by the stand-in";
    return 0;
}
