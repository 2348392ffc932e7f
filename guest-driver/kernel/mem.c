// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: I/O virtual addresses, pinned memory, buffers.
 *
 * The driver chooses every address. A range of addresses is reserved from before
 * the device hears of it until the device has answered that it is unmapped; the
 * pages behind it are pinned for just as long, whoever stopped waiting.
 * Scattered memory goes to the device as several mappings side by side, so that
 * no request outgrows a chain; user space sees one.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "peergate_internal.h"

/* Pages to pin at a time: what fits in a page of pointers. */
#define PG_PIN_BATCH	(PAGE_SIZE / sizeof(struct page *))
/* Ranges of at least this length are aligned to it. */
#define PG_BIG		SZ_2M

/**
 * struct pg_run - Pinned pages that lie side by side.
 * @page: the first
 * @count: how many
 */
struct pg_run {
	struct page *page;
	unsigned long count;
};

/**
 * struct pg_range - A range of I/O virtual addresses.
 * @file: whose
 * @base: first address reserved for it; it may begin later, aligned
 * @iova: first address; 0 before any is reserved
 * @length: bytes
 * @busy: being made or unmade; nobody else may unmap it. Guarded by
 *	pg_file.lock
 * @handle: of a buffer
 * @unmap: of pinned memory: the request that unmaps it, allocated ahead
 * @mm: of pinned memory: whose limit it counts against
 * @accounted: pages counted against it
 * @writable: pages are dirty when unpinned
 * @runs: the pinned pages
 * @run_count: entries of @runs in use
 * @run_room: entries of @runs
 */
struct pg_range {
	struct pg_file *file;
	unsigned long base;
	u64 iova;
	u64 length;
	bool busy;
	u64 handle;
	struct pg_msg *unmap;
	struct mm_struct *mm;
	unsigned long accounted;
	bool writable;
	struct pg_run *runs;
	size_t run_count;
	size_t run_room;
};

/**
 * pg_mem_init() - Begin without any range.
 * @file: the file
 */
void pg_mem_init(struct pg_file *file)
{
	mt_init_flags(&file->ranges, MT_FLAGS_ALLOC_RANGE);
	xa_init(&file->buffers);
}

/**
 * pg_range_free() - Unpin and free.
 * @range: a range that the device does not use and nobody can find
 *
 * Context: Process context, sleeps. Takes mmap_lock of the mm that pinned.
 */
static void pg_range_free(struct pg_range *range)
{
	unsigned long pinned = 0;
	size_t i;

	for (i = 0; i < range->run_count; i++) {
		struct pg_run *run = &range->runs[i];

		unpin_user_page_range_dirty_lock(run->page, run->count, range->writable);
		pinned += run->count;
		cond_resched();
	}
	kvfree(range->runs);
	atomic64_sub(pinned, &range->file->pinned);
	if (range->mm) {
		account_locked_vm(range->mm, range->accounted, false);
		mmdrop(range->mm);
	}
	if (range->unmap)
		pg_msg_put(range->unmap);
	kfree(range);
}

/**
 * pg_mem_destroy() - Free every range; the device knows none any more.
 * @file: the file, used by nobody
 *
 * Context: Process context, sleeps.
 */
void pg_mem_destroy(struct pg_file *file)
{
	struct pg_range *range;
	unsigned long index = 0;

	mt_for_each(&file->ranges, range, index, ULONG_MAX)
		pg_range_free(range);
	mtree_destroy(&file->ranges);
	xa_destroy(&file->buffers);
}

/**
 * pg_range_reserve() - Choose addresses for a range.
 * @range: the range, with its length; busy
 * @align: alignment of its first address, a power of two
 *
 * Context: Process context, sleeps.
 * Return: 0, -ERANGE if the device has not so many addresses, -ENOMEM if they
 * are in use.
 */
static int pg_range_reserve(struct pg_range *range, u64 align)
{
	struct pg_device *dev = range->file->dev;
	u64 room = dev->iova_last - dev->iova_start;
	u64 size;
	int ret;

	align = max_t(u64, align, range->length >= PG_BIG ? PG_BIG : PAGE_SIZE);
	if (check_add_overflow(range->length, align - PAGE_SIZE, &size) || size - 1 > room)
		return -ERANGE;
	ret = mtree_alloc_range(&range->file->ranges, &range->base, range, size, dev->iova_start,
				dev->iova_last, GFP_KERNEL_ACCOUNT);
	if (ret)
		return -ENOMEM;
	range->iova = ALIGN(range->base, align);
	return 0;
}

/**
 * pg_range_drop() - The device does not use a range any more.
 * @range: the range, busy
 *
 * Context: Process context, sleeps. Takes pg_file.lock.
 */
static void pg_range_drop(struct pg_range *range)
{
	struct pg_file *file = range->file;

	if (range->iova) {
		mutex_lock(&file->lock);
		mtree_erase(&file->ranges, range->base);
		mutex_unlock(&file->lock);
	}
	pg_range_free(range);
}

/**
 * pg_range_gone() - The device answered an UNMAP or FREE.
 * @msg: the request
 *
 * If it refused, it may still use the range, which then stays until the file is
 * closed.
 *
 * Context: Process context, sleeps.
 */
static void pg_range_gone(struct pg_msg *msg)
{
	struct pg_range *range = msg->owner;
	struct pg_file *file = range->file;

	switch (msg->error) {
	case 0:
	case -ENOENT:	/* the domain or the buffer ended before */
	case -ESTALE:	/* likewise, or with the device's state */
	case -ENODEV:	/* the device was reset */
		pg_range_drop(range);
		break;
	default:
		break;
	}
	pg_file_put(file);
}

/**
 * pg_runs_append() - Note pinned pages.
 * @range: the range
 * @pages: the pages
 * @count: how many, not 0
 *
 * Context: Process context, sleeps.
 * Return: 0, or -ENOMEM with none of them noted.
 */
static int pg_runs_append(struct pg_range *range, struct page **pages, size_t count)
{
	struct pg_run *last = range->run_count ? &range->runs[range->run_count - 1] : NULL;
	size_t room, i;

	if (range->run_room - range->run_count < count) {
		room = max(range->run_count + count, 2 * range->run_room);
		last = kvrealloc(range->runs, array_size(room, sizeof(*last)),
				 GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
		if (!last)
			return -ENOMEM;
		range->runs = last;
		range->run_room = room;
		last = range->run_count ? &range->runs[range->run_count - 1] : NULL;
	}
	for (i = 0; i < count; i++) {
		if (last && page_to_pfn(last->page) + last->count == page_to_pfn(pages[i])) {
			last->count++;
			continue;
		}
		last = &range->runs[range->run_count++];
		last->page = pages[i];
		last->count = 1;
	}
	atomic64_add(count, &range->file->pinned);
	return 0;
}

/**
 * pg_pin() - Pin memory of the caller.
 * @range: the range, with its length
 * @address: where the memory begins
 *
 * Context: Process context, sleeps; a fatal signal ends it. Takes mmap_lock.
 * Return: 0 or negative errno; pg_range_free() takes back what was pinned.
 */
static int pg_pin(struct pg_range *range, unsigned long address)
{
	unsigned int gup = FOLL_LONGTERM | (range->writable ? FOLL_WRITE : 0);
	unsigned long left = range->length >> PAGE_SHIFT;
	struct page **pages;
	int ret;

	ret = account_locked_vm(current->mm, left, true);
	if (ret)
		return ret;
	range->mm = current->mm;
	mmgrab(range->mm);
	range->accounted = left;

	pages = (struct page **)__get_free_page(GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	while (left) {
		int count = pin_user_pages_fast(address, min(left, PG_PIN_BATCH), gup, pages);

		if (count <= 0) {
			ret = count ?: -EFAULT;
			break;
		}
		ret = pg_runs_append(range, pages, count);
		if (ret) {
			unpin_user_pages(pages, count);
			break;
		}
		address += (unsigned long)count << PAGE_SHIFT;
		left -= count;
		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			break;
		}
		cond_resched();
	}
	free_page((unsigned long)pages);
	return ret;
}

/**
 * pg_map_runs() - Ask the device to map some runs.
 * @range: the range
 * @first: first run
 * @count: how many, at most pg_device.max_segments
 * @iova: where
 * @flags: VIRTIO_PEERGATE_MAP_*
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: bytes mapped or negative errno.
 */
static s64 pg_map_runs(struct pg_range *range, size_t first, size_t count, u64 iova, u32 flags)
{
	struct virtio_peergate_map_segment *segment;
	struct pg_file *file = range->file;
	struct virtio_peergate_map *map;
	struct pg_msg *msg;
	s64 bytes = 0;
	size_t i;
	int ret;

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_MAP, file->domain, file->session,
			   sizeof(*map) + count * sizeof(*segment), 0);
	if (!msg)
		return -ENOMEM;
	map = pg_msg_body(msg);
	map->iova = cpu_to_le64(iova);
	map->flags = cpu_to_le32(flags);
	map->segment_count = cpu_to_le32(count);
	segment = (struct virtio_peergate_map_segment *)(map + 1);
	for (i = 0; i < count; i++) {
		const struct pg_run *run = &range->runs[first + i];
		u64 len = (u64)run->count << PAGE_SHIFT;

		segment[i].gpa = cpu_to_le64(page_to_phys(run->page));
		segment[i].len = cpu_to_le64(len);
		bytes += len;
	}
	pg_msg_send(file->dev, msg);
	ret = pg_msg_wait(file->dev, msg);
	pg_msg_put(msg);
	return ret ?: bytes;
}

/**
 * pg_range_map() - Ask the device to map a range of pinned memory.
 * @range: the range, with its addresses
 * @flags: VIRTIO_PEERGATE_MAP_*
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0, or negative errno with any part of it mapped.
 */
static int pg_range_map(struct pg_range *range, u32 flags)
{
	u64 iova = range->iova;
	size_t first, count;

	for (first = 0; first < range->run_count; first += count) {
		s64 bytes;

		count = min_t(size_t, range->run_count - first, range->file->dev->max_segments);
		bytes = pg_map_runs(range, first, count, iova, flags);
		if (bytes < 0)
			return bytes;
		iova += bytes;
	}
	return 0;
}

/**
 * pg_range_unmap() - Ask the device to unmap a range of pinned memory.
 * @range: the range, busy; not to be used after
 *
 * Context: Process context, sleeps; a fatal signal ends the wait, but not the
 * request.
 * Return: 0 or negative errno.
 */
static int pg_range_unmap(struct pg_range *range)
{
	struct pg_file *file = range->file;
	struct pg_msg *msg = range->unmap;
	struct virtio_peergate_unmap *unmap = pg_msg_body(msg);
	int ret;

	unmap->iova_start = cpu_to_le64(range->iova);
	unmap->iova_last = cpu_to_le64(range->iova + range->length - 1);
	msg->drains = true;
	msg->finish = pg_range_gone;
	msg->owner = range;
	range->unmap = NULL;
	pg_file_get(file);
	pg_msg_send(file->dev, msg);
	ret = pg_msg_wait(file->dev, msg);
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_range_publish() - A range may be unmapped from now on.
 * @range: the range
 *
 * Context: Process context. Takes pg_file.lock.
 */
static void pg_range_publish(struct pg_range *range)
{
	mutex_lock(&range->file->lock);
	range->busy = false;
	mutex_unlock(&range->file->lock);
}

/**
 * pg_range_alloc() - Make a range.
 * @file: the file
 * @length: bytes, a multiple of the page size
 *
 * Context: Process context, sleeps.
 * Return: the range, busy and without addresses, or NULL without memory.
 */
static struct pg_range *pg_range_alloc(struct pg_file *file, u64 length)
{
	struct pg_range *range = kzalloc_obj(*range, GFP_KERNEL_ACCOUNT);

	if (range) {
		range->file = file;
		range->length = length;
		range->busy = true;
	}
	return range;
}

/**
 * pg_map() - PEERGATE_MAP.
 * @file: the file
 * @data: &struct peergate_map
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno, with nothing mapped.
 */
int pg_map(struct pg_file *file, void *data)
{
	struct peergate_map *arg = data;
	struct pg_range *range;
	int ret;

	BUILD_BUG_ON(PEERGATE_READ != VIRTIO_PEERGATE_MAP_READ ||
		     PEERGATE_WRITE != VIRTIO_PEERGATE_MAP_WRITE);
	if (!arg->flags || arg->flags & ~(PEERGATE_READ | PEERGATE_WRITE) || !arg->length ||
	    !PAGE_ALIGNED(arg->address) || !PAGE_ALIGNED(arg->length))
		return -EINVAL;
	if (!access_ok(u64_to_user_ptr(arg->address), arg->length))
		return -EFAULT;

	range = pg_range_alloc(file, arg->length);
	if (!range)
		return -ENOMEM;
	range->writable = arg->flags & PEERGATE_WRITE;
	range->unmap = pg_msg_alloc(VIRTIO_PEERGATE_OP_UNMAP, file->domain, file->session,
				    sizeof(struct virtio_peergate_unmap), 0);
	ret = range->unmap ? pg_pin(range, arg->address) : -ENOMEM;
	if (!ret)
		ret = pg_range_reserve(range, PAGE_SIZE);
	if (ret) {
		pg_range_free(range);
		return ret;
	}
	ret = pg_range_map(range, arg->flags);
	if (ret) {
		pg_range_unmap(range);
		return ret;
	}
	arg->iova = range->iova;
	pg_range_publish(range);
	return 0;
}

/**
 * pg_unmap() - PEERGATE_UNMAP.
 * @file: the file
 * @data: &struct peergate_unmap
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno.
 */
int pg_unmap(struct pg_file *file, void *data)
{
	struct peergate_unmap *arg = data;
	struct pg_range *range;

	if (arg->flags)
		return -EINVAL;
	mutex_lock(&file->lock);
	range = mtree_load(&file->ranges, arg->iova);
	if (range && (range->busy || !range->unmap || range->iova != arg->iova ||
		      range->length != arg->length))
		range = NULL;
	if (range)
		range->busy = true;
	mutex_unlock(&file->lock);
	return range ? pg_range_unmap(range) : -ENOENT;
}

/**
 * pg_map_undo() - Take a PEERGATE_MAP back.
 * @file: the file
 * @data: &struct peergate_map
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 */
void pg_map_undo(struct pg_file *file, void *data)
{
	struct peergate_map *arg = data;
	struct peergate_unmap unmap = { .iova = arg->iova, .length = arg->length };

	pg_unmap(file, &unmap);
}

/**
 * pg_find_endpoint() - Find an endpoint by its number.
 * @dev: the device
 * @endpoint: the number
 *
 * Return: the endpoint or NULL.
 */
static const struct peergate_endpoint *pg_find_endpoint(struct pg_device *dev, u32 endpoint)
{
	unsigned int i;

	for (i = 0; i < dev->endpoint_count; i++)
		if (dev->endpoints[i].endpoint == endpoint)
			return &dev->endpoints[i];
	return NULL;
}

/**
 * pg_range_alloc_buffer() - Ask the device for a buffer.
 * @range: the range, with its addresses
 * @arg: argument of PEERGATE_ALLOC, with the length to ask for
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno. The range is dropped with an error that says that
 * there is no buffer; else it stays until the file is closed.
 */
static int pg_range_alloc_buffer(struct pg_range *range, const struct peergate_alloc *arg)
{
	struct virtio_peergate_alloc body = {
		.endpoint = cpu_to_le32(arg->endpoint),
		.flags = cpu_to_le32(arg->flags),
		.iova = cpu_to_le64(range->iova),
		.len = cpu_to_le64(arg->length),
	};
	struct virtio_peergate_alloc_reply reply;
	struct virtio_peergate_free free;
	struct pg_file *file = range->file;
	int ret;

	ret = pg_request(file, VIRTIO_PEERGATE_OP_ALLOC, &body, sizeof(body), &reply,
			 sizeof(reply), false);
	if (ret) {
		if (ret != -EINTR && ret != -ETIMEDOUT && ret != -EIO)
			pg_range_drop(range);
		return ret;
	}
	range->handle = le64_to_cpu(reply.handle);
	ret = xa_insert(&file->buffers, range->handle, range, GFP_KERNEL_ACCOUNT);
	if (!ret)
		return 0;
	free.handle = reply.handle;
	if (!pg_request(file, VIRTIO_PEERGATE_OP_FREE, &free, sizeof(free), NULL, 0, true))
		pg_range_drop(range);
	return ret == -EBUSY ? -EIO : ret;
}

/**
 * pg_alloc() - PEERGATE_ALLOC.
 * @file: the file
 * @data: &struct peergate_alloc
 *
 * Flags are the device's to judge.
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno, with nothing allocated.
 */
int pg_alloc(struct pg_file *file, void *data)
{
	const struct peergate_endpoint *endpoint;
	struct peergate_alloc *arg = data;
	struct pg_range *range;
	u64 granule, length;
	int ret;

	BUILD_BUG_ON(PEERGATE_ALLOC_REGISTERS != VIRTIO_PEERGATE_ALLOC_REGISTERS);
	if (arg->reserved)
		return -EINVAL;
	endpoint = pg_find_endpoint(file->dev, arg->endpoint);
	if (!endpoint)
		return -ENOENT;
	if (arg->flags & PEERGATE_ALLOC_REGISTERS) {
		granule = PAGE_SIZE;
		if (!endpoint->registers_len)
			return -EOPNOTSUPP;
		if (!arg->length)
			arg->length = endpoint->registers_len;
	} else {
		granule = max_t(u64, endpoint->granularity, PAGE_SIZE);
	}
	if (!arg->length)
		return -EINVAL;
	length = ALIGN(arg->length, granule);
	if (length < arg->length)
		return -ERANGE;
	if (!(arg->flags & PEERGATE_ALLOC_REGISTERS))
		arg->length = length;

	range = pg_range_alloc(file, length);
	if (!range)
		return -ENOMEM;
	ret = pg_range_reserve(range, granule);
	if (ret) {
		pg_range_free(range);
		return ret;
	}
	ret = pg_range_alloc_buffer(range, arg);
	if (ret)
		return ret;
	arg->handle = range->handle;
	arg->iova = range->iova;
	return 0;
}

/**
 * pg_free() - PEERGATE_FREE.
 * @file: the file
 * @data: &struct peergate_free
 *
 * A handle that is not a buffer of this file goes to the device too, which blames
 * the caller for it.
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno.
 */
int pg_free(struct pg_file *file, void *data)
{
	struct peergate_free *arg = data;
	struct virtio_peergate_free *body;
	struct pg_range *range;
	struct pg_msg *msg;
	int ret;

	if (arg->flags)
		return -EINVAL;
	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_FREE, file->domain, file->session, sizeof(*body), 0);
	if (!msg)
		return -ENOMEM;
	body = pg_msg_body(msg);
	body->handle = cpu_to_le64(arg->handle);
	msg->drains = true;
	range = xa_erase(&file->buffers, arg->handle);
	if (range) {
		msg->finish = pg_range_gone;
		msg->owner = range;
		pg_file_get(file);
	}
	pg_msg_send(file->dev, msg);
	ret = pg_msg_wait(file->dev, msg);
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_alloc_undo() - Take a PEERGATE_ALLOC back.
 * @file: the file
 * @data: &struct peergate_alloc
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 */
void pg_alloc_undo(struct pg_file *file, void *data)
{
	struct peergate_alloc *arg = data;
	struct peergate_free free = { .handle = arg->handle };

	pg_free(file, &free);
}
