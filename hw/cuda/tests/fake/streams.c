/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver without a GPU: streams, and what their operations do to memory.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

struct stream *streams;

void violation(const char *what, uint64_t at, size_t len)
{
	fprintf(stderr, "fake libcuda: VIOLATION: %s: %#lx, %zu bytes\n", what, (unsigned long)at, len);
	fake.violations++;
}

int state_of(const struct context *context)
{
	if (fake.lost >> context->gpu & 1)
		return (int)fake.lost_code;
	return context->sticky;
}

struct map *map_of(uint64_t at, int gpu, unsigned int access)
{
	struct map *map = maps;

	while (map && !overlaps(at, 1, map->at, map->size))
		map = map->next;
	return map && (map->access[gpu] & access) == access ? map : NULL;
}

struct registration *registered(uint64_t at, size_t len, const struct context *context, bool *some)
{
	struct registration *it;

	*some = false;
	for (it = registrations; it; it = it->next) {
		/* 1 is CU_MEMHOSTREGISTER_PORTABLE. */
		if (!overlaps(at, len, it->at, it->size) || (it->by != context && !(it->flags & 1)))
			continue;
		*some = true;
		if (it->at <= at && at + len <= it->at + it->size)
			return it;
	}
	return NULL;
}

uint64_t identity(uint64_t at)
{
	unsigned long start, end, offset, major, minor, inode;
	FILE *file = fopen("/proc/self/maps", "re");
	uint64_t found = !file;
	char line[512];

	while (file && !found && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%lx-%lx %*s %lx %lx:%lx %lu", &start, &end, &offset, &major, &minor, &inode) < 6)
			continue;
		if (start <= at && at < end)
			found = inode ? ((inode << 20 ^ major << 8 ^ minor) << 20 ^ (offset + at - start) >> 12) | 2 : 1;
	}
	if (file)
		fclose(file);
	return found;
}

/* Whether it is still what was registered: whoever unmapped it has freed pages that the GPU writes. */
static bool is_intact(const struct registration *it)
{
	return identity(it->at) == it->first && identity(it->at + it->size - 1) == it->last;
}

static bool touches(const struct operation *operation, uint64_t at, size_t len)
{
	size_t i;

	for (i = 0; i < operation->count; i++) {
		const struct piece *piece = &operation->pieces[i];

		if (overlaps(piece->dst, piece->len, at, len) ||
		    (operation->kind == COPY && overlaps(piece->src, piece->len, at, len)))
			return true;
	}
	return false;
}

bool in_use(uint64_t at, size_t len)
{
	const struct operation *operation;
	const struct stream *stream;

	for (stream = streams; stream; stream = stream->next)
		for (operation = stream->first; operation; operation = operation->next)
			if (touches(operation, at, len))
				return true;
	return false;
}

/* Moves bytes between a buffer and memory of the host; false if that is not mapped. */
static bool access_host(uint64_t at, void *bytes, size_t len, bool write)
{
	static int scratch = -1;
	void *host = (void *)at;

	/* The kernel's answer to an address that is not mapped is an error, the processor's would be a signal. */
	if (scratch < 0)
		scratch = memfd_create("fake-cuda-scratch", MFD_CLOEXEC);
	return pwrite(scratch, write ? bytes : host, len, 0) == (ssize_t)len &&
	       pread(scratch, write ? host : bytes, len, 0) == (ssize_t)len;
}

/* Moves up to len bytes between a buffer and a place of either kind; answers how many, or 0. */
static size_t access_bytes(uint64_t at, void *bytes, size_t len, bool write, int gpu)
{
	struct map *map = map_of(at, gpu, write ? 3 : 1);
	ssize_t done;

	if (!map)
		return access_host(at, bytes, len, write) ? len : 0;
	if (len > map->at + map->size - at)
		len = map->at + map->size - at;
	done = write ? pwrite(map->of->fd, bytes, len, (off_t)(at - map->at))
		     : pread(map->of->fd, bytes, len, (off_t)(at - map->at));
	return done < 0 ? 0 : (size_t)done;
}

/* What was fine when it was queued may not be any more. */
static void check_host(uint64_t at, size_t len, const struct context *context, unsigned int access)
{
	struct registration *it;
	bool some;

	if (map_of(at, context->gpu, access))
		return;
	it = registered(at, len, context, &some);
	if (it && !is_intact(it))
		violation("The memory of a registration was unmapped before a stream used it", at, len);
}

static void move(const struct operation *operation, struct piece piece, int gpu)
{
	static char bytes[64 << 10];
	size_t part;

	while (piece.len > 0) {
		part = piece.len < sizeof(bytes) ? piece.len : sizeof(bytes);
		if (operation->kind == SET)
			memset(bytes, (int)operation->value, part);
		else
			part = access_bytes(piece.src, bytes, part, false, gpu);
		part = part ? access_bytes(piece.dst, bytes, part, true, gpu) : 0;
		if (!part) {
			violation("A stream needs memory that is not there", piece.dst, piece.len);
			return;
		}
		piece.dst += part;
		piece.src += part;
		piece.len -= part;
	}
}

static void write_word(const struct operation *operation, int gpu)
{
	const struct piece *piece = operation->pieces;
	uint32_t value = operation->value;

	fake.writes++;
	if (map_of(piece->dst, gpu, 3))
		access_bytes(piece->dst, &value, sizeof(value), true, gpu);
	else if (identity(piece->dst))
		__atomic_store_n((uint32_t *)piece->dst, value, __ATOMIC_RELEASE);
	else
		violation("A stream needs memory that is not there", piece->dst, piece->len);
}

/* The operand of a word's length that comes after what was there. */
static uint64_t changed_word(const struct operation *operation, uint64_t was, uint64_t mask)
{
	switch (operation->value / 2) {
	case 0:
		return was + operation->operand;
	case 1:
		return operation->operand;
	default:
		return was == (operation->compare & mask) ? operation->operand : was;
	}
}

/* Nothing comes in between: everything is done under the lock. */
static void change_word(const struct operation *operation, int gpu)
{
	const struct piece *at = &operation->pieces[0], *into = &operation->pieces[1];
	uint64_t was = 0, now;

	if (access_bytes(at->dst, &was, at->len, false, gpu) != at->len) {
		violation("A kernel needs memory that is not there", at->dst, at->len);
		return;
	}
	now = changed_word(operation, was, at->len == 8 ? UINT64_MAX : UINT32_MAX);
	access_bytes(at->dst, &now, at->len, true, gpu);
	if (!access_bytes(into->dst, &was, sizeof(was), true, gpu))
		violation("A kernel needs memory that is not there", into->dst, into->len);
	fake.atomics++;
}

/* Copies of a batch are in no order: here the last one goes first. */
static void execute(const struct operation *operation, const struct context *context)
{
	size_t i;

	if (operation->kind == ATOMIC)
		change_word(operation, context->gpu);
	for (i = operation->kind == ATOMIC ? 0 : operation->count; i-- > 0;) {
		const struct piece *piece = &operation->pieces[i];

		check_host(piece->dst, piece->len, context, 3);
		if (operation->kind == COPY)
			check_host(piece->src, piece->len, context, 1);
		if (operation->kind == WRITE)
			write_word(operation, context->gpu);
		else
			move(operation, *piece, context->gpu);
	}
	fake.executed++;
}

/* Drops what begins with the operation. */
static void drop_from(struct stream *stream, struct operation **from)
{
	struct operation *next, *it = *from;

	*from = NULL;
	for (; it; it = next, fake.queued--) {
		next = it->next;
		free(it);
	}
	stream->last = stream->first;
}

void drop_operations(const struct context *context)
{
	struct stream *stream;

	/* One that takes its time is its thread's to drop. */
	for (stream = streams; stream; stream = stream->next)
		if (stream->context == context && stream->first)
			drop_from(stream, &stream->first->next);
	pthread_cond_broadcast(&changed);
}

static bool is_of(uint64_t at, int gpu)
{
	const struct map *map = map_of(at, gpu, 1);

	return map && map->of->gpu == gpu;
}

/* Whether a driver leaves it to programs of the GPU and not to a copy engine (H200, driver 580). */
static bool is_program(const struct operation *operation, int gpu)
{
	size_t i;

	if (operation->kind == ATOMIC || operation->kind == SET)
		return true;
	for (i = 0; operation->kind == COPY && i < operation->count; i++) {
		const struct piece *piece = &operation->pieces[i];

		if (is_of(piece->dst, gpu) &&
		    (is_of(piece->src, gpu) ||
		     (!map_of(piece->src, gpu, 1) && piece->len < 32 << 10 && !operation->in_rows)))
			return true;
	}
	return false;
}

static bool stands_still(const struct stream *stream)
{
	if (fake.stall_programs && stream->first && is_program(stream->first, stream->context->gpu))
		return true;
	if (!(fake.stall >> stream->context->gpu & 1))
		return false;
	if (fake.steps <= 0)
		return true;
	fake.steps--;
	return false;
}

static void take_time(void)
{
	static unsigned int seed = 1;
	long us = fake.delay + (fake.jitter > 0 ? rand_r(&seed) % (fake.jitter + 1) : 0);
	struct timespec time = { us / 1000000, us % 1000000 * 1000 };

	pthread_mutex_unlock(&lock);
	if (us > 0)
		nanosleep(&time, NULL);
	pthread_mutex_lock(&lock);
}

/*
 * A stream that fails breaks its context, of which every call fails from then on; other streams go on with what they have, words included, as those of an H200
 * do (driver 580). Of a GPU that is gone nothing goes on.
 */
static bool is_done_for(const struct stream *stream)
{
	return stream->is_dead || fake.lost >> stream->context->gpu & 1;
}

static void carry_out(struct stream *stream)
{
	struct context *context = stream->context;

	take_time();
	if (!is_done_for(stream) && fake.fault_after >= 0 && fake.fault_after-- == 0) {
		/* Half done, as it may be. */
		if (stream->first->kind == COPY || stream->first->kind == SET) {
			stream->first->pieces[0].len /= 2;
			execute(stream->first, context);
		}
		context->sticky = ILLEGAL_ADDRESS;
		stream->is_dead = true;
	}
	if (is_done_for(stream)) {
		if (!stream->is_dead)
			drop_operations(context);
		drop_from(stream, &stream->first);
	} else {
		struct operation *done = stream->first;

		execute(done, context);
		stream->first = done->next;
		fake.queued--;
		free(done);
	}
	pthread_cond_broadcast(&changed);
}

static void *work_off(void *argument)
{
	struct stream *stream = argument, **at = &streams;

	pthread_mutex_lock(&lock);
	for (;;) {
		/* What is lost or has failed does not stand still. */
		if (stream->first && (is_done_for(stream) || !stands_still(stream)))
			carry_out(stream);
		else if (!stream->first && stream->over)
			break;
		else
			pthread_cond_wait(&changed, &lock);
	}
	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	free(stream);
	pthread_mutex_unlock(&lock);
	return NULL;
}

int start_stream(struct context *context, struct stream **out)
{
	struct stream *stream = calloc(1, sizeof(*stream));
	pthread_t thread;

	if (!stream || pthread_create(&thread, NULL, work_off, stream)) {
		free(stream);
		return OUT_OF_MEMORY;
	}
	pthread_detach(thread);
	stream->context = context;
	stream->next = streams;
	streams = stream;
	fake.streams++;
	*out = stream;
	return OK;
}

struct operation *operation(int kind, size_t count)
{
	struct operation *operation = calloc(1, sizeof(*operation) + count * sizeof(struct piece));

	if (!operation)
		abort();
	operation->kind = kind;
	operation->count = count;
	return operation;
}

void enqueue(struct stream *stream, struct operation *operation)
{
	if (stream->first)
		stream->last->next = operation;
	else
		stream->first = operation;
	stream->last = operation;
	fake.queued++;
	pthread_cond_broadcast(&changed);
}
