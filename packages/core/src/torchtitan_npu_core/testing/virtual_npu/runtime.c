/* A device runtime on host memory: what torch_npu needs of CANN's libascendcl to hold tensors.
 *
 * Signatures follow the headers that the torch_npu wheel carries. Everything happens at once, in the
 * calling thread: a stream has nothing pending when a call returns, and every event has passed.
 * Allocated memory is filled with 0xff, a NaN in every floating-point format torch has. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "common.h"

#define OUT_OF_MEMORY 207001 /* ACL_ERROR_RT_MEMORY_ALLOCATION */
#define BAD_DEVICE 107001    /* ACL_ERROR_RT_INVALID_DEVICEID */
#define MAX_DEVICES 64

static const size_t total_memory = 64ULL << 30;
static size_t used_memory[MAX_DEVICES];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;
static __thread char message[640];

void set_message(const char *text) { snprintf(message, sizeof message, "%s", text); }

API const char *aclGetRecentErrMsg(void) { return message; }

/* ------------------------------------------------------------------ devices */

static unsigned device_count(void) {
    const char *text = getenv("TORCHTITAN_NPU_VIRTUAL_DEVICES");
    int count = text ? atoi(text) : 1;
    return count < 1 ? 1 : count > MAX_DEVICES ? MAX_DEVICES : count;
}

API int aclrtGetDeviceCount(unsigned *count) { *count = device_count(); return 0; }

API int aclrtSetDevice(int device) {
    if (device < 0 || (unsigned)device >= device_count()) {
        set_message("no such virtual device");
        return BAD_DEVICE;
    }
    current_device = device;
    return 0;
}

API int aclrtGetDevice(int *device) { *device = current_device; return 0; }

API const char *aclrtGetSocName(void) {
    const char *family = getenv("TORCHTITAN_NPU_VIRTUAL_FAMILY");
    if (family && !strcmp(family, "a3")) return "Ascend910_9391";
    if (family && !strcmp(family, "950")) return "Ascend950PR_9589";
    return "Ascend910B1";
}

/* ------------------------------------------------------------------ memory */

struct block { size_t size; int device; char pad[512 - sizeof(size_t) - sizeof(int)]; };

static int reserve(int device, size_t size) {
    int ok;
    pthread_mutex_lock(&memory_lock);
    ok = used_memory[device] + size <= total_memory;
    if (ok) used_memory[device] += size;
    pthread_mutex_unlock(&memory_lock);
    return ok;
}

static void give_back(int device, size_t size) {
    pthread_mutex_lock(&memory_lock);
    used_memory[device] -= size;
    pthread_mutex_unlock(&memory_lock);
}

API int aclrtMalloc(void **pointer, size_t size, int policy) {
    struct block *block;
    if (!reserve(current_device, size)) return OUT_OF_MEMORY;
    if (posix_memalign((void **)&block, 512, sizeof *block + (size ? size : 512))) {
        give_back(current_device, size);
        return OUT_OF_MEMORY;
    }
    block->size = size;
    block->device = current_device;
    *pointer = block + 1;
    memset(*pointer, 0xff, size);
    return 0;
}

API int aclrtMallocAlign32(void **pointer, size_t size, int policy) {
    return aclrtMalloc(pointer, size, policy);
}

API int aclrtFree(void *pointer) {
    if (pointer) {
        struct block *block = (struct block *)pointer - 1;
        give_back(block->device, block->size);
        free(block);
    }
    return 0;
}

API int aclrtMallocHost(void **pointer, size_t size) {
    return posix_memalign(pointer, 512, size ? size : 512) ? OUT_OF_MEMORY : 0;
}

API int aclrtMallocHostWithCfg(void **pointer, uint64_t size, void *config) {
    return aclrtMallocHost(pointer, size);
}

API int aclrtFreeHost(void *pointer) { free(pointer); return 0; }

API int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    memmove(to, from, size);
    return 0;
}

API int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    memmove(to, from, size);
    return 0;
}

API int aclrtMemset(void *to, size_t room, int value, size_t size) { memset(to, value, size); return 0; }

API int aclrtMemsetAsync(void *to, size_t room, int value, size_t size, void *stream) {
    memset(to, value, size);
    return 0;
}

API int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    pthread_mutex_lock(&memory_lock);
    *available = total_memory - used_memory[current_device];
    pthread_mutex_unlock(&memory_lock);
    *total = total_memory;
    return 0;
}

/* expandable segments: address space first, memory behind it later */

API int aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *wish, uint64_t flags) {
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *pointer = found;
    return 0;
}

API int aclrtReleaseMemAddress(void *pointer) { return 0; }

struct physical { size_t size; int device; };

API int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags) {
    struct physical *made;
    if (!reserve(current_device, size)) return OUT_OF_MEMORY;
    made = malloc(sizeof *made);
    made->size = size;
    made->device = current_device;
    *handle = made;
    return 0;
}

API int aclrtFreePhysical(void *handle) {
    struct physical *made = handle;
    give_back(made->device, made->size);
    free(made);
    return 0;
}

API int aclrtMapMem(void *pointer, size_t size, size_t offset, void *handle, uint64_t flags) {
    memset(pointer, 0xff, ((struct physical *)handle)->size);
    return 0;
}

API int aclrtUnmapMem(void *pointer) { return 0; }

/* ------------------------------------------------------------------ streams and events */

static int next_stream = 1;
struct stream { int id; };
struct event { struct timespec at; };

static int new_stream(void **stream) {
    struct stream *made = malloc(sizeof *made);
    made->id = __atomic_fetch_add(&next_stream, 1, __ATOMIC_RELAXED);
    *stream = made;
    return 0;
}

static int new_event(void **event) {
    struct event *made = malloc(sizeof *made);
    clock_gettime(CLOCK_MONOTONIC, &made->at);
    *event = made;
    return 0;
}

API int aclrtCreateStream(void **stream) { return new_stream(stream); }
API int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return new_stream(stream); }
API int aclrtDestroyStream(void *stream) { free(stream); return 0; }
API int aclrtDestroyStreamForce(void *stream) { free(stream); return 0; }
API int aclrtStreamQuery(void *stream, int *status) { *status = 0; return 0; }
API int aclrtStreamGetId(void *stream, int *id) { *id = stream ? ((struct stream *)stream)->id : 0; return 0; }

static int the_context;
API int aclrtGetCurrentContext(void **context) { *context = &the_context; return 0; }
API int aclrtCreateContext(void **context, int device) { *context = &the_context; return 0; }

API int aclrtCreateEvent(void **event) { return new_event(event); }
API int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return new_event(event); }
API int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return new_event(event); }
API int aclrtDestroyEvent(void *event) { free(event); return 0; }

API int aclrtRecordEvent(void *event, void *stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->at);
    return 0;
}

API int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    struct timespec a = ((struct event *)start)->at, b = ((struct event *)end)->at;
    *milliseconds = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) / 1e6f;
    return 0;
}

API int aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    struct timespec at = ((struct event *)event)->at;
    *microseconds = at.tv_sec * 1000000ULL + at.tv_nsec / 1000;
    return 0;
}

API int aclrtQueryEvent(void *event, int *status) { *status = 1; return 0; }
API int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return 0; }
API int aclrtQueryEventRecordedStatus(void *event, int *status) { *status = 1; return 0; }
API int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return 0; }

API int aclrtLaunchCallback(void (*function)(void *), void *data, int blocking, void *stream) {
    function(data);
    return 0;
}

API int aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    function(data);
    return 0;
}

/* ------------------------------------------------------------------ compiler options */

API size_t aclGetCompileoptSize(int option) { return 16; }

API int aclGetCompileopt(int option, char *value, size_t size) {
    strncpy(value, "disable", size);
    return 0;
}
