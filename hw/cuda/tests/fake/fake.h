/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver without a GPU: what its parts share.
 *
 * Everything is behind one lock. A stream is a thread that works off its queue; the
 * lock is free while an operation takes its time, and held while its bytes move.
 *
 * Addresses of device memory lie in a reservation that the processor cannot touch:
 * the bytes are in a memfd, read and written through its descriptor. So memory of the
 * host that is not there is EFAULT, counted, and no crash.
 */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_GPUS 32
#define MAX_ATTRIBUTES 160
#define GRANULE ((size_t)2 << 20)

enum {
	OK = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	DEVICE_UNAVAILABLE = 46,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	OPERATING_SYSTEM = 304,
	INVALID_HANDLE = 400,
	NOT_READY = 600,
	ILLEGAL_ADDRESS = 700,
	CONTEXT_IS_DESTROYED = 709,
	ALREADY_REGISTERED = 712,
	NOT_REGISTERED = 713,
	NOT_SUPPORTED = 801,
	UNKNOWN = 999,
};

/* What a test sets and gets by name; counters are as good as settings. */
#define NUMBERS(X)                                                             \
	/* Settings. */                                                        \
	X(gpus, 1)              /* how many there are */                       \
	X(peers, 1)             /* GPUs reach each other... */                 \
	X(peer_rank, 0)         /* ...so fast among such... */                 \
	X(peer_atomics, 1)      /* ...and with atomic operations */            \
	X(memory, 1l << 30)     /* bytes a GPU has */                          \
	X(version, 13000)       /* what the driver says it is */               \
	X(init_error, 0)        /* what cuInit answers: 100 is no device */    \
	X(oom, 0)               /* so many cuMemCreate fail */                 \
	X(room, 1l << 40)       /* bytes of host memory that can be registered */ \
	X(export_error, 0)      /* what an export answers: 304 once confined */ \
	X(delay, 0)             /* us before each operation */                 \
	X(jitter, 0)            /* us at most, at random, on top of that */    \
	X(stall_programs, 0)    /* Streams that come to a program stand still. */ \
	X(stall, 0)             /* GPUs (a mask) whose streams stand still... */ \
	X(steps, 0)             /* ...but for so many operations */            \
	X(fault_after, -1)      /* operations until a context fails; -1: never */ \
	X(jit, 1)               /* it compiles kernels */                      \
	X(lost, 0)              /* GPUs (a mask) that are gone... */           \
	X(lost_code, DEVICE_UNAVAILABLE) /* ...and what they answer */         \
	/* What there is. */                                                   \
	X(contexts, 0)                                                         \
	X(streams, 0)                                                          \
	X(allocations, 0)                                                      \
	X(allocated, 0)         /* bytes */                                    \
	X(reservations, 0)                                                     \
	X(maps, 0)                                                             \
	X(registrations, 0)                                                    \
	X(registered, 0)        /* bytes */                                    \
	X(queued, 0)            /* operations that have not ended */           \
	/* What there was. */                                                  \
	X(registers, 0)         /* calls that registered */                    \
	X(most_registered, 0)   /* bytes at a time */                          \
	X(copies, 0)            /* calls of cuMemcpyAsync */                   \
	X(in_rows, 0)           /* calls of cuMemcpy2DAsync */                 \
	X(batches, 0)           /* calls of cuMemcpyBatchAsync */              \
	X(batched, 0)           /* copies in them */                           \
	X(longest_batched, 0)   /* bytes of the longest one */                 \
	X(sets, 0)                                                             \
	X(writes, 0)            /* words written by streams */                 \
	X(atomics, 0)           /* kernels that changed a word */              \
	X(executed, 0)          /* operations that streams have carried out */ \
	X(flushes, 0)                                                          \
	X(pageable, 0)          /* copies of host memory that nobody registered */ \
	X(abandoned, 0)         /* what a context still had when it went */    \
	/* What must never be: see violation(). */                             \
	X(violations, 0)

struct numbers {
#define X(name, value) long name;
	NUMBERS(X)
#undef X
};

/* The primary context of a GPU. */
struct context {
	int gpu, refs, sticky;
};

/* Physical memory, here a memfd with one page more, which says whose it is. */
struct allocation {
	int fd, gpu, handles, maps;
	bool is_imported, can_export;
	size_t size;
};

struct map {
	struct map *next;
	uint64_t at;
	size_t size;
	struct allocation *of;
	unsigned int access[MAX_GPUS];
};

struct reservation {
	struct reservation *next;
	uint64_t at;
	size_t size;
	/* What was asked of the kernel, for the alignment's sake. */
	void *raw;
	size_t raw_size;
};

struct registration {
	struct registration *next;
	uint64_t at;
	size_t size;
	unsigned int flags;
	struct context *by;
	/* What was mapped there. */
	uint64_t first, last;
};

struct piece {
	uint64_t dst, src;
	size_t len;
};

struct operation {
	struct operation *next;
	enum { COPY, SET, WRITE, ATOMIC } kind;
	uint32_t value;
	bool in_rows;
	/* Of an atomic one. */
	uint64_t operand, compare;
	size_t count;
	struct piece pieces[];
};

struct stream {
	struct stream *next;
	struct context *context;
	/* The one that runs is still the first. */
	struct operation *first, *last;
	/* No more comes; nothing is carried out any more. */
	bool over, is_dead;
};

extern struct numbers fake;
extern struct context contexts[MAX_GPUS];
extern long attributes[MAX_ATTRIBUTES];
extern struct map *maps;
extern struct reservation *reservations;
extern struct registration *registrations;
extern struct stream *streams;
extern bool is_initialized;
/* Of this thread. */
extern __thread struct context *current;
extern pthread_mutex_t lock;
/* Something was queued, has ended, or may go on. */
extern pthread_cond_t changed;

#define API __attribute__((visibility("default")))
#define LOCKED __attribute__((cleanup(unlock), unused)) int guard = take_lock()
#define TRY(result)                      \
	do {                             \
		int answer_ = (result);  \
		if (answer_)             \
			return answer_;  \
	} while (0)

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct allocation *CUhandle;

#define overlaps(a, a_len, b, b_len) ((a) < (b) + (b_len) && (b) < (a) + (a_len))

int take_lock(void);
void unlock(int *guard);
/* What stands against a call about a GPU, in the current context, on a stream. */
int may(int gpu);
int may_here(void);
int may_stream(const struct stream *stream);

/* Says on standard error what must never be, and counts it. */
void violation(const char *what, uint64_t at, size_t len);
/* What the context or its device answers to everything, if it does. */
int state_of(const struct context *context);
/* The map that has this byte, if the GPU may do this to it (1 reads, 3 writes). */
struct map *map_of(uint64_t at, int gpu, unsigned int access);
/* The registration that has all of it, as the context sees it; or one that has some. */
struct registration *registered(uint64_t at, size_t len, const struct context *context, bool *some);
/* What the process has mapped at an address: 0 nothing, 1 no file or nobody knows. */
uint64_t identity(uint64_t at);

/* Whether something that has not ended uses these bytes. */
bool in_use(uint64_t at, size_t len);
int start_stream(struct context *context, struct stream **out);
/* Drops all that the context's streams have to do. */
void drop_operations(const struct context *context);
struct operation *operation(int kind, size_t count);
void enqueue(struct stream *stream, struct operation *operation);

#endif
