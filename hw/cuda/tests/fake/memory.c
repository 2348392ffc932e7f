/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver without a GPU: memory of devices.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

struct location {
	int type, id;
};

struct properties {
	int type, handle_types;
	struct location location;
	void *metadata;
	unsigned char compression, is_rdma;
	unsigned short usage;
	unsigned char reserved[4];
};

struct access {
	struct location location;
	int flags;
};

_Static_assert(sizeof(struct properties) == 32 && sizeof(struct access) == 12, "as in cuda.h");

/* What the page behind an allocation's last byte says. */
struct trailer {
	char magic[8];
	int gpu;
};

static const char MAGIC[8] = "fakecuda";

struct map *maps;
struct reservation *reservations;

static int check_properties(const struct properties *properties)
{
	/* Pinned, on a device. */
	if (properties->type != 1 || properties->location.type != 1 || properties->handle_types & ~1)
		return INVALID_VALUE;
	return may(properties->location.id);
}

API CUresult cuMemGetAllocationGranularity(size_t *granule, const struct properties *properties, int option)
{
	LOCKED;

	TRY(check_properties(properties));
	*granule = GRANULE;
	return option == 0 || option == 1 ? OK : INVALID_VALUE;
}

static CUhandle new_allocation(int fd, size_t size, int gpu)
{
	CUhandle new = calloc(1, sizeof(*new));

	if (!new)
		abort();
	*new = (struct allocation){ .fd = fd, .size = size, .gpu = gpu, .handles = 1 };
	fake.allocations++;
	return new;
}

static void put_allocation(CUhandle it)
{
	if (it->handles || it->maps)
		return;
	fake.allocations--;
	fake.allocated -= it->is_imported ? 0 : (long)it->size;
	close(it->fd);
	free(it);
}

API CUresult cuMemCreate(CUhandle *handle, size_t size, const struct properties *properties, unsigned long long flags)
{
	LOCKED;
	struct trailer trailer = { .gpu = properties->location.id };
	char dirt[4096];
	size_t at;
	int fd;

	TRY(check_properties(properties));
	if (flags || !size || size % GRANULE)
		return INVALID_VALUE;
	if (fake.oom > 0 || fake.allocated + (long)size > fake.memory) {
		fake.oom -= fake.oom > 0;
		return OUT_OF_MEMORY;
	}
	fd = memfd_create("fake-cuda", MFD_CLOEXEC);
	memcpy(trailer.magic, MAGIC, sizeof(MAGIC));
	if (fd < 0 || ftruncate(fd, (off_t)size + 4096) ||
	    pwrite(fd, &trailer, sizeof(trailer), (off_t)size) != sizeof(trailer))
		return OPERATING_SYSTEM;
	/* Nobody promises that it is zero. Ends and beginnings of granules will do. */
	memset(dirt, 0xd7, sizeof(dirt));
	for (at = 0; at < size; at += GRANULE)
		if (pwrite(fd, dirt, sizeof(dirt), (off_t)at) < 0 ||
		    pwrite(fd, dirt, sizeof(dirt), (off_t)(at + GRANULE - sizeof(dirt))) < 0)
			return OPERATING_SYSTEM;
	*handle = new_allocation(fd, size, trailer.gpu);
	(*handle)->can_export = properties->handle_types & 1;
	fake.allocated += (long)size;
	return OK;
}

API CUresult cuMemRelease(CUhandle handle)
{
	LOCKED;

	TRY(may(handle->gpu));
	if (!handle->handles)
		return INVALID_VALUE;
	handle->handles--;
	put_allocation(handle);
	return OK;
}

API CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
	LOCKED;
	int fd;

	TRY(may(handle->gpu));
	if (fake.export_error)
		return (int)fake.export_error;
	if (type != 1 || flags || !handle->can_export)
		return INVALID_VALUE;
	fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 3);
	memcpy(out, &fd, sizeof(fd));
	return fd < 0 ? OPERATING_SYSTEM : OK;
}

API CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *os_handle, int type)
{
	LOCKED;
	int fd = (int)(intptr_t)os_handle;
	struct trailer trailer;
	struct stat stat;

	if (type != 1 || fstat(fd, &stat) || stat.st_size < 4096 ||
	    pread(fd, &trailer, sizeof(trailer), stat.st_size - 4096) != sizeof(trailer) ||
	    memcmp(trailer.magic, MAGIC, sizeof(MAGIC)))
		return INVALID_VALUE;
	TRY(may(trailer.gpu));
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return OPERATING_SYSTEM;
	*handle = new_allocation(fd, (size_t)stat.st_size - 4096, trailer.gpu);
	(*handle)->is_imported = true;
	return OK;
}

API CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr at, size_t size, int type, unsigned long long flags)
{
	LOCKED;
	struct map *map = maps;
	int fd;

	TRY(may_here());
	while (map && map->at != at)
		map = map->next;
	if (type != 1 || flags > 1 || !map || map->size != size || !attributes[124])
		return map && attributes[124] ? INVALID_VALUE : NOT_SUPPORTED;
	fd = fcntl(map->of->fd, F_DUPFD_CLOEXEC, 3);
	memcpy(out, &fd, sizeof(fd));
	return fd < 0 ? OPERATING_SYSTEM : OK;
}

API CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr wish,
				 unsigned long long flags)
{
	LOCKED;
	struct reservation *new;

	(void)wish;
	alignment = alignment ?: GRANULE;
	if (!is_initialized)
		return NOT_INITIALIZED;
	if (!size || size % GRANULE || alignment % GRANULE || alignment & (alignment - 1) || flags)
		return INVALID_VALUE;
	new = calloc(1, sizeof(*new));
	if (!new)
		abort();
	*new = (struct reservation){ .next = reservations, .size = size, .raw_size = size + alignment };
	new->raw = mmap(NULL, new->raw_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (new->raw == MAP_FAILED) {
		free(new);
		return OUT_OF_MEMORY;
	}
	new->at = ((uint64_t)new->raw + alignment - 1) & ~(alignment - 1);
	reservations = new;
	fake.reservations++;
	*at = new->at;
	return OK;
}

API CUresult cuMemAddressFree(CUdeviceptr at, size_t size)
{
	LOCKED;
	struct reservation *gone, **it = &reservations;
	struct map *map;

	while (*it && (*it)->at != at)
		it = &(*it)->next;
	gone = *it;
	if (!gone || gone->size != size)
		return INVALID_VALUE;
	for (map = maps; map; map = map->next)
		if (overlaps(map->at, map->size, at, size))
			return INVALID_VALUE;
	*it = gone->next;
	munmap(gone->raw, gone->raw_size);
	free(gone);
	fake.reservations--;
	return OK;
}

API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
	LOCKED;
	const struct reservation *in = reservations;
	struct map *map;

	TRY(may(handle->gpu));
	while (in && !(in->at <= at && at + size <= in->at + in->size))
		in = in->next;
	if (!in || offset || flags || !size || size % GRANULE || at % GRANULE || size != handle->size)
		return INVALID_VALUE;
	for (map = maps; map; map = map->next)
		if (overlaps(map->at, map->size, at, size))
			return INVALID_VALUE;
	map = calloc(1, sizeof(*map));
	if (!map)
		abort();
	*map = (struct map){ .next = maps, .at = at, .size = size, .of = handle };
	handle->maps++;
	maps = map;
	fake.maps++;
	return OK;
}

API CUresult cuMemUnmap(CUdeviceptr at, size_t size)
{
	LOCKED;
	struct map *gone, **it = &maps;

	while (*it && (*it)->at != at)
		it = &(*it)->next;
	gone = *it;
	if (!gone || gone->size != size)
		return INVALID_VALUE;
	TRY(may(gone->of->gpu));
	if (in_use(at, size))
		violation("Device memory is unmapped that a stream has to use", at, size);
	*it = gone->next;
	gone->of->maps--;
	put_allocation(gone->of);
	free(gone);
	fake.maps--;
	return OK;
}

API CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const struct access *access, size_t count)
{
	LOCKED;
	struct map *map = maps;
	size_t i;

	while (map && map->at != at)
		map = map->next;
	if (!map || map->size != size)
		return INVALID_VALUE;
	for (i = 0; i < count; i++) {
		int gpu = access[i].location.id;

		TRY(may(gpu));
		if (access[i].location.type != 1 || (access[i].flags & ~3) || access[i].flags == 2)
			return INVALID_VALUE;
		if (gpu != map->of->gpu && !fake.peers)
			return INVALID_DEVICE;
		map->access[gpu] = (unsigned int)access[i].flags;
	}
	return OK;
}
