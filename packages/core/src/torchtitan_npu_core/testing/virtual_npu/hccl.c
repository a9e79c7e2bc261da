/* HCCL's entry points for ranks on one machine, over shared memory.
 *
 * A communicator is one file that all ranks map: a header, then for every rank a slot with a chunk
 * of its data. A collective walks through the ranks' data chunk by chunk: everybody publishes a
 * chunk, all wait, everybody reads what it needs from the others, all wait. Point-to-point messages
 * are files of their own, so a send never waits for its receiver. Calls are over when they return. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

enum { E_PARA = 1, E_NOT_SUPPORT = 5, E_SYSCALL = 8, E_TIMEOUT = 9, E_REMOTE = 21 };
enum { SUM, PROD, MAX, MIN };
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16 };

#define CHUNK (4u << 20)
#define ROOT_INFO_BYTES 4108
#define NAME_BYTES 128

struct slot {
    volatile int32_t pid;    /* 0 until the rank has come */
    volatile int32_t call;   /* what the rank is doing, to notice ranks that do different things */
    volatile uint64_t bytes; /* length of all its data in this collective */
};

struct header {
    volatile uint64_t arrived; /* barrier arrivals so far, of all ranks */
    struct slot slots[];
};

struct comm {
    char name[NAME_BYTES];
    uint32_t rank, size;
    uint64_t passed;         /* barriers this rank has come to */
    struct header *header;
    char *data;              /* size chunks */
    size_t mapped;
    uint64_t *sent, *received; /* messages so far, per peer */
    int failed;
};

/* ------------------------------------------------------------------ waiting */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double patience(void) {
    const char *text = getenv("HCCL_EXEC_TIMEOUT");
    double seconds = text ? atof(text) : 0;
    return seconds > 0 ? seconds : 1800;
}

static int complain(int code, const char *format, const char *name, long detail) {
    char text[600];
    snprintf(text, sizeof text, format, name, detail);
    set_message(text);
    fprintf(stderr, "virtual HCCL: %s\n", text);
    return code;
}

/* rank that has ended, or -1 */
static int missing_rank(struct comm *c) {
    for (uint32_t i = 0; i < c->size; i++) {
        int pid = c->header->slots[i].pid;
        if (pid && kill(pid, 0) && errno == ESRCH) return (int)i;
    }
    return -1;
}

/* Wait until a condition holds; looks for ended ranks and the time limit now and then. */
#define WAIT_UNTIL(c, condition)                                                                   \
    do {                                                                                           \
        double end_ = 0;                                                                           \
        for (unsigned turn_ = 0; !(condition); turn_++) {                                          \
            if (turn_ < 64) continue;                                                              \
            usleep(turn_ < 2000 ? 20 : 500);                                                       \
            if (!end_) end_ = now() + patience();                                                  \
            if (turn_ % 512) continue;                                                             \
            if (missing_rank(c) >= 0 && !(condition)) {                                            \
                (c)->failed = 1;                                                                   \
                return complain(E_REMOTE, "group %s: rank %ld has ended", (c)->name,               \
                                missing_rank(c));                                                  \
            }                                                                                      \
            if (now() > end_) {                                                                    \
                (c)->failed = 1;                                                                   \
                return complain(E_TIMEOUT, "group %s: waited HCCL_EXEC_TIMEOUT, %ld s", (c)->name, \
                                (long)patience());                                                 \
            }                                                                                      \
        }                                                                                          \
    } while (0)

static int barrier(struct comm *c) {
    uint64_t goal;
    if (c->failed) return complain(E_REMOTE, "group %s failed before (rank %ld)", c->name, c->rank);
    goal = ++c->passed * c->size;
    __atomic_add_fetch(&c->header->arrived, 1, __ATOMIC_SEQ_CST);
    WAIT_UNTIL(c, __atomic_load_n(&c->header->arrived, __ATOMIC_SEQ_CST) >= goal);
    return 0;
}

/* ------------------------------------------------------------------ communicators */

static const char *folder(void) {
    const char *chosen = getenv("TORCHTITAN_NPU_VIRTUAL_SHARED");
    if (chosen) return chosen;
    return access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
}

API int HcclGetRootInfo(void *info) {
    static int count;
    memset(info, 0, ROOT_INFO_BYTES);
    snprintf(info, NAME_BYTES, "ttnpu-%d-%d-%llx", getpid(), __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST),
             (unsigned long long)(now() * 1e9));
    return 0;
}

static int make_comm(const char *name, uint32_t size, uint32_t rank, void **made) {
    char path[NAME_BYTES + 64];
    size_t head = sizeof(struct header) + size * sizeof(struct slot);
    struct comm *c;
    int file, problem;
    if (rank >= size) return complain(E_PARA, "group %s: rank %ld is not below its size", name, rank);
    head = (head + 4095) & ~(size_t)4095;
    c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->rank = rank;
    c->size = size;
    c->mapped = head + (size_t)size * CHUNK;
    c->sent = calloc(size, sizeof *c->sent);
    c->received = calloc(size, sizeof *c->received);
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, c->mapped))
        return complain(E_SYSCALL, "cannot make the shared file %s (errno %ld)", path, errno);
    c->header = mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->header == MAP_FAILED)
        return complain(E_SYSCALL, "cannot map the shared file %s (errno %ld)", path, errno);
    c->data = (char *)c->header + head;
    c->header->slots[rank].pid = getpid();
    problem = barrier(c);
    /* mapped by everybody: the name can go, and nothing stays behind whatever happens later */
    if (rank == 0) unlink(path);
    if (problem) return problem;
    *made = c;
    return 0;
}

API int HcclCommInitRootInfo(uint32_t size, const void *info, uint32_t rank, void **comm) {
    return make_comm(info, size, rank, comm);
}

API int HcclCommInitRootInfoConfig(uint32_t size, const void *info, uint32_t rank, const void *config, void **comm) {
    return make_comm(info, size, rank, comm);
}

API int HcclCreateSubCommConfig(void **parent, uint32_t size, uint32_t *ranks, uint64_t id, uint32_t rank,
                                void *config, void **comm) {
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%.80s-%llu", ((struct comm *)*parent)->name, (unsigned long long)id);
    return make_comm(name, size, rank, comm);
}

API int HcclCommDestroy(void *comm) {
    struct comm *c = comm;
    if (c) {
        munmap(c->header, c->mapped);
        free(c->sent);
        free(c->received);
        free(c);
    }
    return 0;
}

API int HcclGetCommName(void *comm, char *name) { strcpy(name, ((struct comm *)comm)->name); return 0; }
API int HcclGetRankSize(void *comm, uint32_t *size) { *size = ((struct comm *)comm)->size; return 0; }
API int HcclGetRankId(void *comm, uint32_t *rank) { *rank = ((struct comm *)comm)->rank; return 0; }
API int HcclGetCommAsyncError(void *comm, int *error) { *error = 0; return 0; }
API uint32_t HcclGetCommConfigCapability(void) { return 0; }

API const char *HcclGetErrorString(int code) { return code ? aclGetRecentErrMsg() : "no error"; }

/* ------------------------------------------------------------------ elements */

static size_t width(int type) {
    switch (type) {
    case INT8: case UINT8: case 14: case 15: case 16: case 17: return 1;
    case INT16: case UINT16: case FP16: case BFP16: return 2;
    case INT32: case UINT32: case FP32: return 4;
    case INT64: case UINT64: case FP64: return 8;
    case 12: return 16;
    }
    return 0;
}

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
}

static float from_fp16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    uint32_t wide;
    float value;
    if (exponent == 0) { /* zero and subnormal: mantissa * 2^-24 */
        value = mantissa * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_fp16(float value) {
    uint32_t bits, sign, mantissa;
    int exponent;
    memcpy(&bits, &value, 4);
    sign = (bits >> 16) & 0x8000;
    exponent = (int)((bits >> 23) & 255) - 112;
    mantissa = bits & 0x7fffff;
    if (value != value) return sign | 0x7e00;
    if (exponent >= 31) return sign | 0x7c00;
    if (exponent <= 0) { /* subnormal: shift the full mantissa, round to nearest even */
        int shift = 14 - exponent;
        uint32_t half, rest;
        if (shift > 24) return sign;
        mantissa |= 0x800000;
        half = mantissa >> shift;
        rest = mantissa & ((1u << shift) - 1);
        if (rest > 1u << (shift - 1) || (rest == 1u << (shift - 1) && half & 1)) half++;
        return sign | half;
    }
    bits = (uint32_t)exponent << 10 | mantissa >> 13;
    mantissa &= 0x1fff;
    if (mantissa > 0x1000 || (mantissa == 0x1000 && bits & 1)) bits++;
    return sign | bits;
}

#define COMBINE(a, b, op) ((op) == SUM ? (a) + (b) : (op) == PROD ? (a) * (b) : \
                           (op) == MAX ? ((b) > (a) || (b) != (b) ? (b) : (a)) : ((b) < (a) || (b) != (b) ? (b) : (a)))

#define REDUCE(T, WIDE, LOAD, STORE)                                                     \
    for (uint64_t i = 0; i < count; i++) {                                               \
        WIDE value = LOAD(((T *)parts[0])[i]);                                           \
        for (uint32_t peer = 1; peer < peers; peer++) {                                  \
            WIDE other = LOAD(((T *)parts[peer])[i]);                                    \
            value = COMBINE(value, other, op);                                           \
        }                                                                                \
        ((T *)out)[i] = STORE(value);                                                    \
    }                                                                                    \
    return 0

/* out[i] = parts[0][i] op parts[1][i] ..., in rank order; 16-bit floats are combined in float32 */
static int reduce(void *out, char **parts, uint32_t peers, uint64_t count, int type, int op) {
    switch (type) {
    case INT8: REDUCE(int8_t, int8_t, , );
    case INT16: REDUCE(int16_t, int16_t, , );
    case INT32: REDUCE(int32_t, int32_t, , );
    case INT64: REDUCE(int64_t, int64_t, , );
    case FP32: REDUCE(float, float, , );
    case FP16: REDUCE(uint16_t, float, from_fp16, to_fp16);
    case BFP16: REDUCE(uint16_t, float, from_bf16, to_bf16);
    }
    return E_NOT_SUPPORT;
}

static int reducible(struct comm *c, int type, int op) {
    int known = type == INT8 || type == INT16 || type == INT32 || type == INT64 || type == FP32 || type == FP16 ||
                type == BFP16;
    if (!known) return complain(E_NOT_SUPPORT, "group %s: data type %ld cannot be reduced", c->name, type);
    if (op < SUM || op > MIN) return complain(E_NOT_SUPPORT, "group %s: no reduction %ld", c->name, op);
    return 0;
}

/* ------------------------------------------------------------------ collectives */

typedef int (*visitor)(struct comm *c, void *state, uint64_t offset, uint64_t *lengths);

static char *chunk_of(struct comm *c, uint32_t rank) { return c->data + (size_t)rank * CHUNK; }

/* Show every rank's data to every rank, chunk by chunk. `visit` gets the offset of the chunk and how
 * many bytes of it each rank has. */
static int exchange(struct comm *c, int call, const void *send, uint64_t bytes, visitor visit, void *state) {
    uint64_t longest = 0, lengths[c->size];
    struct slot *mine = &c->header->slots[c->rank];
    int problem, result = 0;
    mine->bytes = bytes;
    mine->call = call;
    if ((problem = barrier(c))) return problem;
    for (uint32_t i = 0; i < c->size; i++) {
        if (c->header->slots[i].call != call) {
            c->failed = 1;
            return complain(E_PARA, "group %s: rank %ld is in another collective", c->name, i);
        }
        if (c->header->slots[i].bytes > longest) longest = c->header->slots[i].bytes;
    }
    for (uint64_t offset = 0; offset < longest || offset == 0; offset += CHUNK) {
        if (offset < bytes)
            memcpy(chunk_of(c, c->rank), (const char *)send + offset, bytes - offset < CHUNK ? bytes - offset : CHUNK);
        if ((problem = barrier(c))) return problem;
        for (uint32_t i = 0; i < c->size; i++) {
            uint64_t all = c->header->slots[i].bytes;
            lengths[i] = all <= offset ? 0 : all - offset < CHUNK ? all - offset : CHUNK;
        }
        if (visit && !result) result = visit(c, state, offset, lengths);
        if ((problem = barrier(c))) return problem;
    }
    return result;
}

/* A piece of every rank's data that this rank wants, and where each goes. */
struct pieces { uint64_t *from, *length; char **to; };

static int take_pieces(struct comm *c, void *state, uint64_t offset, uint64_t *lengths) {
    struct pieces *p = state;
    for (uint32_t i = 0; i < c->size; i++) {
        uint64_t begin = p->from[i] > offset ? p->from[i] : offset;
        uint64_t end = p->from[i] + p->length[i];
        if (end > offset + lengths[i]) end = offset + lengths[i];
        if (begin < end) memcpy(p->to[i] + (begin - p->from[i]), chunk_of(c, i) + (begin - offset), end - begin);
    }
    return 0;
}

/* The same range of every rank's data, combined. */
struct range { uint64_t from, length; char *to; int type, op; };

static int take_reduced(struct comm *c, void *state, uint64_t offset, uint64_t *lengths) {
    struct range *r = state;
    uint64_t begin = r->from > offset ? r->from : offset, end = r->from + r->length;
    char *parts[c->size];
    if (end > offset + lengths[0]) end = offset + lengths[0];
    if (begin >= end) return 0;
    for (uint32_t i = 0; i < c->size; i++) {
        if (lengths[i] != lengths[0])
            return complain(E_PARA, "group %s: rank %ld reduces another number of elements", c->name, i);
        parts[i] = chunk_of(c, i) + (begin - offset);
    }
    return reduce(r->to + (begin - r->from), parts, c->size, (end - begin) / width(r->type), r->type, r->op);
}

enum { ALL_REDUCE = 1, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, REDUCE_TO, SCATTER, TABLE, BARRIER };

API int HcclBarrier(void *comm, void *stream) { return exchange(comm, BARRIER, NULL, 0, NULL, NULL); }

API int HcclAllReduce(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream) {
    struct range r = {0, count * width(type), receive, type, op};
    int problem = reducible(comm, type, op);
    return problem ? problem : exchange(comm, ALL_REDUCE, send, r.length, take_reduced, &r);
}

API int HcclReduce(void *send, void *receive, uint64_t count, int type, int op, uint32_t root, void *comm,
                   void *stream) {
    struct comm *c = comm;
    struct range r = {0, count * width(type), receive, type, op};
    int problem = reducible(comm, type, op);
    return problem ? problem : exchange(c, REDUCE_TO, send, r.length, c->rank == root ? take_reduced : NULL, &r);
}

API int HcclReduceScatterV(void *send, const void *counts, const void *displacements, void *receive, uint64_t count,
                           int type, int op, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t total = 0, size = width(type);
    struct range r = {((const uint64_t *)displacements)[c->rank] * size, count * size, receive, type, op};
    int problem = reducible(comm, type, op);
    for (uint32_t i = 0; i < c->size; i++) {
        uint64_t end = ((const uint64_t *)counts)[i] + ((const uint64_t *)displacements)[i];
        if (end * size > total) total = end * size;
    }
    return problem ? problem : exchange(c, REDUCE_SCATTER, send, total, take_reduced, &r);
}

API int HcclReduceScatter(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t length = count * width(type);
    struct range r = {c->rank * length, length, receive, type, op};
    int problem = reducible(comm, type, op);
    return problem ? problem : exchange(c, REDUCE_SCATTER, send, c->size * length, take_reduced, &r);
}

/* gather `lengths[i]` bytes at `from[i]` of every rank i to receive + places[i] */
static int gather(struct comm *c, int call, const void *send, uint64_t bytes, const uint64_t *from,
                  const uint64_t *lengths, const uint64_t *places, char *receive) {
    uint64_t begin[c->size], length[c->size];
    char *to[c->size];
    struct pieces p = {begin, length, to};
    for (uint32_t i = 0; i < c->size; i++) {
        begin[i] = from[i];
        length[i] = lengths[i];
        to[i] = receive + places[i];
    }
    return exchange(c, call, send, bytes, take_pieces, &p);
}

API int HcclAllGatherV(void *send, uint64_t count, void *receive, const void *counts, const void *displacements,
                       int type, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t from[c->size], length[c->size], place[c->size], size = width(type);
    for (uint32_t i = 0; i < c->size; i++) {
        from[i] = 0;
        length[i] = ((const uint64_t *)counts)[i] * size;
        place[i] = ((const uint64_t *)displacements)[i] * size;
    }
    return gather(c, ALL_GATHER, send, count * size, from, length, place, receive);
}

API int HcclAllGather(void *send, void *receive, uint64_t count, int type, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t from[c->size], length[c->size], place[c->size], bytes = count * width(type);
    for (uint32_t i = 0; i < c->size; i++) {
        from[i] = 0;
        length[i] = bytes;
        place[i] = i * bytes;
    }
    return gather(c, ALL_GATHER, send, bytes, from, length, place, receive);
}

API int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t from[c->size], length[c->size], place[c->size], bytes = count * width(type);
    memset(from, 0, sizeof from);
    memset(length, 0, sizeof length);
    memset(place, 0, sizeof place);
    if (c->rank != root) length[root] = bytes;
    return gather(c, BROADCAST, buffer, c->rank == root ? bytes : 0, from, length, place, buffer);
}

API int HcclScatter(void *send, void *receive, uint64_t count, int type, uint32_t root, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t from[c->size], length[c->size], place[c->size], bytes = count * width(type);
    memset(from, 0, sizeof from);
    memset(length, 0, sizeof length);
    memset(place, 0, sizeof place);
    from[root] = c->rank * bytes;
    length[root] = bytes;
    return gather(c, SCATTER, send, c->rank == root ? c->size * bytes : 0, from, length, place, receive);
}

struct table { uint64_t *rows; size_t row; };

static int take_rows(struct comm *c, void *state, uint64_t offset, uint64_t *lengths) {
    struct table *t = state;
    for (uint32_t i = 0; i < c->size; i++) memcpy((char *)t->rows + i * t->row, chunk_of(c, i), t->row);
    return 0;
}

API int HcclAlltoAllV(const void *send, const void *send_counts, const void *send_places, int send_type,
                      const void *receive, const void *counts, const void *places, int type, void *comm,
                      void *stream) {
    struct comm *c = comm;
    uint32_t n = c->size;
    uint64_t mine[2 * n], all[2 * n * n], from[n], length[n], place[n], bytes = 0, size = width(send_type);
    struct table table = {all, sizeof mine};
    int problem;
    for (uint32_t i = 0; i < n; i++) {
        mine[i] = ((const uint64_t *)send_counts)[i] * size;
        mine[n + i] = ((const uint64_t *)send_places)[i] * size;
        if (mine[i] && mine[i] + mine[n + i] > bytes) bytes = mine[i] + mine[n + i];
    }
    /* what the others send has to be known to find it in their data */
    if ((problem = exchange(c, TABLE, mine, sizeof mine, take_rows, &table))) return problem;
    for (uint32_t i = 0; i < n; i++) {
        from[i] = all[i * 2 * n + n + c->rank];
        length[i] = all[i * 2 * n + c->rank];
        place[i] = ((const uint64_t *)places)[i] * width(type);
        if (length[i] != ((const uint64_t *)counts)[i] * width(type)) {
            c->failed = 1;
            return complain(E_PARA, "group %s: rank %ld sends another number of elements than expected", c->name, i);
        }
    }
    return gather(c, ALL_TO_ALL, send, bytes, from, length, place, (char *)receive);
}

API int HcclAlltoAll(const void *send, uint64_t send_count, int send_type, const void *receive, uint64_t count,
                     int type, void *comm, void *stream) {
    struct comm *c = comm;
    uint64_t from[c->size], length[c->size], place[c->size], bytes = send_count * width(send_type);
    for (uint32_t i = 0; i < c->size; i++) {
        from[i] = c->rank * bytes;
        length[i] = bytes;
        place[i] = i * bytes;
    }
    return gather(c, ALL_TO_ALL, send, c->size * bytes, from, length, place, (char *)receive);
}

API int HcclAlltoAllVC(const void *send, const void *matrix, int send_type, const void *receive, int type,
                       void *comm, void *stream) {
    struct comm *c = comm;
    uint32_t n = c->size;
    const uint64_t *counts = matrix;
    uint64_t sends[n], send_places[n], receives[n], places[n];
    for (uint32_t i = 0; i < n; i++) {
        sends[i] = counts[c->rank * n + i];
        receives[i] = counts[i * n + c->rank];
        send_places[i] = i ? send_places[i - 1] + sends[i - 1] : 0;
        places[i] = i ? places[i - 1] + receives[i - 1] : 0;
    }
    return HcclAlltoAllV(send, sends, send_places, send_type, receive, receives, places, type, comm, stream);
}

/* ------------------------------------------------------------------ point to point */

static void message_path(struct comm *c, uint32_t from, uint32_t to, uint64_t number, char *path, size_t room) {
    snprintf(path, room, "%s/%s.%u-%u.%llu", folder(), c->name, from, to, (unsigned long long)number);
}

API int HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, void *comm, void *stream) {
    struct comm *c = comm;
    char path[400], partial[420];
    size_t left = count * width(type), done;
    const char *at = buffer;
    int file;
    if (peer >= c->size) return complain(E_PARA, "group %s has no rank %ld", c->name, peer);
    message_path(c, c->rank, peer, c->sent[peer]++, path, sizeof path);
    snprintf(partial, sizeof partial, "%s.part", path);
    file = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return complain(E_SYSCALL, "cannot write the message %s (errno %ld)", partial, errno);
    for (; left; left -= done, at += done) {
        ssize_t wrote = write(file, at, left);
        if (wrote <= 0) {
            close(file);
            unlink(partial);
            return complain(E_SYSCALL, "cannot write the message %s (errno %ld)", partial, errno);
        }
        done = wrote;
    }
    close(file);
    /* complete under its final name, or not there */
    return rename(partial, path) ? complain(E_SYSCALL, "cannot name the message %s (errno %ld)", path, errno) : 0;
}

API int HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, void *comm, void *stream) {
    struct comm *c = comm;
    char path[400], *at = buffer;
    size_t left = count * width(type);
    struct stat found;
    int file;
    if (peer >= c->size) return complain(E_PARA, "group %s has no rank %ld", c->name, peer);
    message_path(c, peer, c->rank, c->received[peer]++, path, sizeof path);
    WAIT_UNTIL(c, !access(path, R_OK));
    file = open(path, O_RDONLY | O_CLOEXEC);
    unlink(path);
    if (file < 0 || fstat(file, &found) || (size_t)found.st_size != left) {
        if (file >= 0) close(file);
        return complain(E_PARA, "group %s: the message from rank %ld has another length than expected", c->name, peer);
    }
    while (left) {
        ssize_t got = read(file, at, left);
        if (got <= 0) break;
        at += got;
        left -= got;
    }
    close(file);
    return left ? complain(E_SYSCALL, "cannot read the message %s (errno %ld)", path, errno) : 0;
}

struct item { int kind; void *buffer; uint64_t count; int type; uint32_t peer; };

API int HcclBatchSendRecv(struct item *items, uint32_t count, void *comm, void *stream) {
    int problem;
    for (int kind = 0; kind < 2; kind++) /* sends never wait, so they go first */
        for (uint32_t i = 0; i < count; i++) {
            struct item *it = &items[i];
            if (it->kind != kind) continue;
            problem = kind ? HcclRecv(it->buffer, it->count, it->type, it->peer, comm, stream)
                           : HcclSend(it->buffer, it->count, it->type, it->peer, comm, stream);
            if (problem) return problem;
        }
    return 0;
}
