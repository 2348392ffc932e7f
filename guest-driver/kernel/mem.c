// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: memory of programs.
 *
 * MAP pins pages and maps them, UNMAP takes both back. Scattered memory goes to
 * the device as several mappings side by side, so that no request outgrows a
 * chain; user space sees one.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "peergate_internal.h"

/* Pages to pin at a time: what fits in a page of pointers. */
#define PG_PIN_BATCH	(PAGE_SIZE / sizeof(struct page *))

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
	struct pg_run *last, *runs;
	size_t room, i;

	if (range->run_room - range->run_count < count) {
		room = max(range->run_count + count, 2 * range->run_room);
		runs = pg_kvrealloc(range->runs, array_size(range->run_room, sizeof(*runs)),
				    array_size(room, sizeof(*runs)),
				    GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
		if (!runs)
			return -ENOMEM;
		range->runs = runs;
		range->run_room = room;
	}
	last = range->run_count ? &range->runs[range->run_count - 1] : NULL;
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
	unsigned int gup = FOLL_LONGTERM | (range->writable ? FOLL_WRITE : PG_FOLL_READ);
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

	msg = pg_msg_alloc(VIRTIO_PEERGATE_OP_MAP, file->domain, file->session->number,
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

		count = min_t(size_t, range->run_count - first, range->file->session->max_segments);
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
	msg->drain_ms = file->session->max_timeout_ms;
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

	BUILD_BUG_ON(VIRTIO_PEERGATE_MAP_READ != PEERGATE_READ ||
		     VIRTIO_PEERGATE_MAP_WRITE != PEERGATE_WRITE);
	if (!arg->flags || arg->flags & ~(PEERGATE_READ | PEERGATE_WRITE) || !arg->length ||
	    !PAGE_ALIGNED(arg->address) || !PAGE_ALIGNED(arg->length))
		return -EINVAL;
	if (!access_ok(u64_to_user_ptr(arg->address), arg->length))
		return -EFAULT;

	range = pg_range_alloc(file, arg->length);
	if (!range)
		return -ENOMEM;
	range->writable = arg->flags & PEERGATE_WRITE;
	range->unmap = pg_msg_alloc(VIRTIO_PEERGATE_OP_UNMAP, file->domain, file->session->number,
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
