/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver without a GPU: settings, devices, contexts, streams.
 *
 * The functions are those that the driver exports, as CUDA 13 on a 64-bit machine has them.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct numbers fake = {
#define X(name, value) .name = value,
	NUMBERS(X)
#undef X
};

static const struct {
	const char *name;
	long *value;
} names[] = {
#define X(name, value) { #name, &fake.name },
	NUMBERS(X)
#undef X
};

/* Those that somebody may ask for; tests set others by number. */
long attributes[MAX_ATTRIBUTES] = {
	[40] = 3,    /* copy engines */
	[41] = 1,    /* unified addresses */
	[91] = 1,    /* the host's address is the device's */
	[99] = 1,    /* host memory can be registered */
	[102] = 1,   /* cuMemCreate and what belongs to it */
	[103] = 1,   /* descriptors */
	[110] = 1,   /* GPUDirect RDMA with it */
	[117] = 1,   /* flushes by the host */
	[118] = 100, /* its writes are seen in order by their owner */
	[122] = 1,   /* words written by streams */
	[124] = 1,   /* dma-bufs */
};

struct context contexts[MAX_GPUS];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
bool is_initialized;
__thread struct context *current;

int take_lock(void)
{
	pthread_mutex_lock(&lock);
	return 0;
}

void unlock(int *guard)
{
	(void)guard;
	pthread_mutex_unlock(&lock);
}

/* Settings and counters. */

static long *number(const char *name)
{
	size_t i;
	int n;

	for (i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (!strcmp(name, names[i].name))
			return names[i].value;
	if (sscanf(name, "attribute %d", &n) == 1 && n >= 0 && n < MAX_ATTRIBUTES)
		return &attributes[n];
	return NULL;
}

API int fake_set(const char *name, long value)
{
	LOCKED;
	long *it = number(name);

	if (!it)
		return -1;
	*it = value;
	pthread_cond_broadcast(&changed);
	return 0;
}

API long fake_get(const char *name)
{
	LOCKED;
	long *it = number(name);

	return it ? *it : -1000;
}

/* For processes that a test cannot ask: FAKE_CUDA="gpus=2 peers=0". */
__attribute__((constructor)) static void read_environment(void)
{
	char *copy = strdup(getenv("FAKE_CUDA") ?: ""), *rest = copy, *word, *value;

	while (copy && (word = strsep(&rest, " "))) {
		value = strchr(word, '=');
		if (value)
			*value++ = 0, fake_set(word, atol(value));
	}
	free(copy);
}

/* What is asked first. */

int may(int gpu)
{
	if (!is_initialized)
		return NOT_INITIALIZED;
	if (gpu < 0 || gpu >= fake.gpus || gpu >= MAX_GPUS)
		return INVALID_DEVICE;
	return state_of(&contexts[gpu]);
}

int may_here(void)
{
	if (!is_initialized)
		return NOT_INITIALIZED;
	if (!current)
		return INVALID_CONTEXT;
	return current->refs ? may(current->gpu) : CONTEXT_IS_DESTROYED;
}

int may_stream(const struct stream *stream)
{
	const struct stream *it = streams;

	TRY(may_here());
	while (it && it != stream)
		it = it->next;
	return it && !it->over ? may(it->context->gpu) : INVALID_HANDLE;
}

API CUresult cuInit(unsigned int flags)
{
	LOCKED;

	if (flags)
		return INVALID_VALUE;
	if (fake.init_error)
		return (int)fake.init_error;
	if (fake.gpus == 0)
		return NO_DEVICE;
	if (!is_initialized)
		for (int i = 0; i < MAX_GPUS; i++)
			contexts[i].gpu = i;
	is_initialized = true;
	return OK;
}

API CUresult cuDriverGetVersion(int *version)
{
	LOCKED;

	*version = (int)fake.version;
	return OK;
}

static const struct {
	int number;
	const char *name, *text;
} errors[] = {
	{ OK, "CUDA_SUCCESS", "no error" },
	{ INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
	{ OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
	{ NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
	{ DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable" },
	{ NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
	{ INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
	{ INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
	{ OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS" },
	{ INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle" },
	{ NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready" },
	{ ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
	{ CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed" },
	{ ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped" },
	{ NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region" },
	{ NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported" },
	{ 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination" },
	{ UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error" },
};

static CUresult describe(CUresult error, const char **out, bool name)
{
	size_t i;

	for (i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].number == error) {
			*out = name ? errors[i].name : errors[i].text;
			return OK;
		}
	*out = NULL;
	return INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult error, const char **out)
{
	return describe(error, out, true);
}

API CUresult cuGetErrorString(CUresult error, const char **out)
{
	return describe(error, out, false);
}

/* Devices. A lost one is still there. */

static int is_there(CUdevice device)
{
	int answer = may(device);

	return answer == NOT_INITIALIZED || answer == INVALID_DEVICE ? answer : OK;
}

API CUresult cuDeviceGetCount(int *count)
{
	LOCKED;

	*count = (int)fake.gpus;
	return is_initialized ? OK : NOT_INITIALIZED;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	LOCKED;

	*device = ordinal;
	return is_there(ordinal);
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	snprintf(name, (size_t)len, "Fake GPU %d", device);
	return OK;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	for (int i = 0; i < 16; i++)
		uuid[i] = (unsigned char)(i * 0x11);
	uuid[15] = (unsigned char)device;
	return OK;
}

API CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	return snprintf(id, (size_t)len, "0000:%02X:00.0", 0x1a + device) < len ? OK : INVALID_VALUE;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	if (attribute < 1 || attribute >= MAX_ATTRIBUTES)
		return INVALID_VALUE;
	*value = (int)attributes[attribute];
	return OK;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	*bytes = (size_t)fake.memory;
	return OK;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
	LOCKED;

	TRY(is_there(device));
	TRY(is_there(peer));
	*can = device != peer && fake.peers;
	return OK;
}

API CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice from, CUdevice to)
{
	LOCKED;
	const long known[] = { fake.peer_rank, fake.peers, fake.peers && fake.peer_atomics, fake.peers };

	TRY(is_there(from));
	TRY(is_there(to));
	if (from == to || attribute < 1 || attribute > 4)
		return INVALID_VALUE;
	*value = (int)known[attribute - 1];
	return OK;
}

/* Contexts. */

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
	LOCKED;

	(void)flags;
	return may(device);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	LOCKED;

	TRY(may(device));
	fake.contexts += contexts[device].refs++ == 0;
	*context = &contexts[device];
	return OK;
}

/* A context takes along what it still has. */
static void end_context(struct context *context)
{
	struct registration *gone, **it = &registrations;
	struct stream *stream;

	context->sticky = 0;
	drop_operations(context);
	for (stream = streams; stream; stream = stream->next) {
		if (stream->context != context)
			continue;
		fake.streams -= !stream->over, fake.abandoned += !stream->over;
		stream->over = stream->is_dead = true;
	}
	while ((gone = *it)) {
		if (gone->by != context) {
			it = &gone->next;
			continue;
		}
		*it = gone->next;
		fake.registered -= (long)gone->size, fake.registrations--, fake.abandoned++;
		free(gone);
	}
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	LOCKED;

	TRY(is_there(device));
	if (!contexts[device].refs)
		return INVALID_CONTEXT;
	if (--contexts[device].refs == 0) {
		fake.contexts--;
		end_context(&contexts[device]);
	}
	return OK;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
	LOCKED;

	if (!is_initialized)
		return NOT_INITIALIZED;
	if (context && (context < contexts || context >= contexts + MAX_GPUS || !context->refs))
		return INVALID_CONTEXT;
	current = context;
	return OK;
}

/* Streams. */

API CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	LOCKED;

	TRY(may_here());
	return flags > 1 ? INVALID_VALUE : start_stream(current, stream);
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
	LOCKED;

	TRY(may_stream(stream));
	stream->over = true;
	fake.streams--;
	pthread_cond_broadcast(&changed);
	return OK;
}

API CUresult cuStreamQuery(CUstream stream)
{
	LOCKED;

	TRY(may_stream(stream));
	return stream->first ? NOT_READY : OK;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
	LOCKED;

	TRY(may_stream(stream));
	while (stream->first) {
		pthread_cond_wait(&changed, &lock);
		TRY(may_stream(stream));
	}
	return OK;
}
