/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver without a GPU: memory of the host, and what is given to streams.
 *
 * FAKE_VERSION below 13000, 12080 or 11070 leaves out what older drivers lack.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <stdlib.h>

#include "fake.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 13000
#endif

struct attributes {
	int order, src[2], dst[2];
	unsigned int flags;
};

_Static_assert(sizeof(struct attributes) == 24, "as in cuda.h");

struct registration *registrations;

API CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned int flags)
{
	LOCKED;
	uint64_t first = (uint64_t)at;
	struct registration *it;

	TRY(may_here());
	/* Portable, mapped, of a device, only read. */
	if (!size || flags & ~15u || !identity(first) || !identity(first + size - 1))
		return INVALID_VALUE;
	for (it = registrations; it; it = it->next)
		if (overlaps(first, size, it->at, it->size))
			return ALREADY_REGISTERED;
	if (fake.registered + (long)size > fake.room)
		return OUT_OF_MEMORY;
	it = calloc(1, sizeof(*it));
	if (!it)
		abort();
	*it = (struct registration){ registrations, first, size, flags, current, identity(first), identity(first + size - 1) };
	registrations = it;
	fake.registrations++, fake.registers++;
	fake.registered += (long)size;
	if (fake.registered > fake.most_registered)
		fake.most_registered = fake.registered;
	return OK;
}

API CUresult cuMemHostUnregister(void *at)
{
	LOCKED;
	struct registration *gone, **it = &registrations;

	TRY(may_here());
	while (*it && (*it)->at != (uint64_t)at)
		it = &(*it)->next;
	gone = *it;
	if (!gone)
		return NOT_REGISTERED;
	if (in_use(gone->at, gone->size))
		violation("Memory is let go of that a stream has to use", gone->at, gone->size);
	if (identity(gone->at) != gone->first || identity(gone->at + gone->size - 1) != gone->last)
		violation("Memory was unmapped while it was registered", gone->at, gone->size);
	*it = gone->next;
	fake.registrations--;
	fake.registered -= (long)gone->size;
	free(gone);
	return OK;
}

/* What streams do. */

/* Whether a stream of the current context may do this with these bytes. */
static int check_place(const struct stream *stream, CUdeviceptr at, size_t len, bool write, bool *is_bare)
{
	const struct reservation *it;
	struct registration *in;
	CUdeviceptr next = at;
	struct map *map;
	bool some;

	if (!len || at + len < at)
		return INVALID_VALUE;
	for (it = reservations; it; it = it->next) {
		if (!overlaps(at, len, it->at, it->size))
			continue;
		while (next < at + len) {
			map = map_of(next, stream->context->gpu, write ? 3 : 1);
			if (!map)
				return INVALID_VALUE;
			next = map->at + map->size;
		}
		return OK;
	}
	in = registered(at, len, stream->context, &some);
	*is_bare |= !some;
	/* 8 is CU_MEMHOSTREGISTER_READ_ONLY. */
	return (some && !in) || (in && write && in->flags & 8) ? INVALID_VALUE : OK;
}

static int check_copy(const struct stream *stream, CUdeviceptr dst, CUdeviceptr src, size_t len)
{
	bool is_bare = false;

	TRY(check_place(stream, dst, len, true, &is_bare));
	TRY(check_place(stream, src, len, false, &is_bare));
	if (overlaps(dst, len, src, len))
		violation("A copy whose ends overlap", dst, len);
	if (is_bare) {
		fprintf(stderr, "fake libcuda: A pageable copy: %zu bytes from %#lx to %#lx\n", len, (unsigned long)src,
			(unsigned long)dst);
		fake.pageable++;
	}
	return OK;
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t len, CUstream stream)
{
	LOCKED;
	struct operation *copy;

	TRY(may_stream(stream));
	TRY(check_copy(stream, dst, src, len));
	copy = operation(COPY, 1);
	copy->pieces[0] = (struct piece){ dst, src, len };
	enqueue(stream, copy);
	fake.copies++;
	return OK;
}

struct side {
	size_t x, y;
	int kind;
	void *host;
	CUdeviceptr at;
	void *array;
	size_t pitch;
};

struct rows {
	struct side src, dst;
	size_t width, height;
};

_Static_assert(sizeof(struct rows) == 128, "as in cuda.h");

API CUresult cuMemcpy2DAsync_v2(const struct rows *rows, CUstream stream)
{
	LOCKED;
	const struct side *src = &rows->src, *dst = &rows->dst;
	struct operation *copy;
	size_t i;

	TRY(may_stream(stream));
	/* 4 is CU_MEMORYTYPE_UNIFIED. */
	if (src->kind != 4 || dst->kind != 4 || src->x || src->y || dst->x || dst->y || !rows->height ||
	    src->pitch < rows->width || dst->pitch < rows->width)
		return INVALID_VALUE;
	for (i = 0; i < rows->height; i++)
		TRY(check_copy(stream, dst->at + i * dst->pitch, src->at + i * src->pitch, rows->width));
	copy = operation(COPY, rows->height);
	copy->in_rows = rows->height > 1;
	for (i = 0; i < rows->height; i++)
		copy->pieces[i] = (struct piece){ dst->at + i * dst->pitch, src->at + i * src->pitch, rows->width };
	enqueue(stream, copy);
	fake.in_rows++;
	return OK;
}

#if FAKE_VERSION >= 12080
static int copy_batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,
		      const struct attributes *attributes, const size_t *starts, size_t kinds, size_t *failed,
		      CUstream stream)
{
	struct operation *batch;
	size_t i;

	TRY(may_stream(stream));
	/* Each attribute is for the copies from its start to the next one's. */
	if (!count || !kinds || kinds > count || starts[0])
		return INVALID_VALUE;
	for (i = 0; i < kinds; i++)
		if (attributes[i].order < 1 || attributes[i].order > 3 || starts[i] >= count ||
		    (i && starts[i] <= starts[i - 1]))
			return INVALID_VALUE;
	for (i = 0; i < count; i++) {
		*failed = i;
		TRY(check_copy(stream, dsts[i], srcs[i], sizes[i]));
	}
	batch = operation(COPY, count);
	for (i = 0; i < count; i++) {
		batch->pieces[i] = (struct piece){ dsts[i], srcs[i], sizes[i] };
		if ((long)sizes[i] > fake.longest_batched)
			fake.longest_batched = (long)sizes[i];
	}
	enqueue(stream, batch);
	fake.batches++;
	fake.batched += (long)count;
	return OK;
}

API CUresult cuMemcpyBatchAsync(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,
				const struct attributes *attributes, const size_t *starts, size_t kinds,
				size_t *failed, CUstream stream)
{
	LOCKED;

	*failed = SIZE_MAX;
	return copy_batch(dsts, srcs, sizes, count, attributes, starts, kinds, failed, stream);
}
#endif

#if FAKE_VERSION >= 13000
API CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,
				   const struct attributes *attributes, const size_t *starts, size_t kinds,
				   CUstream stream)
{
	LOCKED;
	size_t failed;

	return copy_batch(dsts, srcs, sizes, count, attributes, starts, kinds, &failed, stream);
}
#endif

API CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t len, CUstream stream)
{
	LOCKED;
	struct operation *set;
	bool is_bare = false;

	TRY(may_stream(stream));
	TRY(check_place(stream, at, len, true, &is_bare));
	if (is_bare)
		return INVALID_VALUE;
	set = operation(SET, 1);
	set->value = value;
	set->pieces[0] = (struct piece){ at, 0, len };
	enqueue(stream, set);
	fake.sets++;
	return OK;
}

#if FAKE_VERSION >= 11070
API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr at, uint32_t value, unsigned int flags)
{
	LOCKED;
	struct operation *write;
	bool is_bare = false;

	TRY(may_stream(stream));
	TRY(check_place(stream, at, 4, true, &is_bare));
	if (is_bare || at % 4 || flags > 1)
		return INVALID_VALUE;
	write = operation(WRITE, 1);
	write->value = value;
	write->pieces[0] = (struct piece){ at, 0, 4 };
	enqueue(stream, write);
	return OK;
}
#endif

API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	LOCKED;

	TRY(may_here());
	/* The current context; its owner, or all devices. */
	if (target != 0 || (scope != 100 && scope != 200))
		return INVALID_VALUE;
	fake.flushes++;
	return OK;
}

/* Of kernels there is one: it changes a word, and says what was there. */

#define MODULE  ((void *)0x10)
#define KERNEL  ((void *)0x20)

API CUresult cuModuleLoadData(void **module, const void *image)
{
	LOCKED;

	TRY(may_here());
	/* CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_INVALID_PTX */
	if (!fake.jit)
		return 221;
	if (!strstr(image, ".entry atomic("))
		return 218;
	*module = MODULE;
	return OK;
}

API CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
	LOCKED;

	TRY(may_here());
	if (module != MODULE || strcmp(name, "atomic"))
		return 500; /* CUDA_ERROR_NOT_FOUND */
	*function = KERNEL;
	return OK;
}

API CUresult cuLaunchKernel(void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
			    unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
			    CUstream stream, void **arguments, void **extra)
{
	LOCKED;
	CUdeviceptr at, into;
	struct operation *change;
	bool is_bare = false;
	unsigned int which;
	size_t len;

	TRY(may_stream(stream));
	if (function != KERNEL || grid_x * grid_y * grid_z * block_x * block_y * block_z != 1 || shared || extra)
		return INVALID_VALUE;
	at = *(uint64_t *)arguments[0];
	into = *(uint64_t *)arguments[1];
	which = *(uint32_t *)arguments[4];
	len = which % 2 ? 8 : 4;
	TRY(check_place(stream, at, len, true, &is_bare));
	TRY(check_place(stream, into, 8, true, &is_bare));
	if (is_bare || at % len || into % 8 || which > 5)
		return INVALID_VALUE;
	change = operation(ATOMIC, 2);
	change->value = which;
	change->operand = *(uint64_t *)arguments[2];
	change->compare = *(uint64_t *)arguments[3];
	change->pieces[0] = (struct piece){ at, 0, len };
	change->pieces[1] = (struct piece){ into, 0, 8 };
	enqueue(stream, change);
	return OK;
}
