// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: ranges of I/O virtual addresses.
 *
 * The driver chooses every address. A range is reserved from before the device
 * hears of it until the device has answered that it is unmapped; the pages behind
 * it are pinned for just as long, whoever stopped waiting.
 */
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "peergate_internal.h"

/* Ranges of at least this length are aligned to it. */
#define PG_BIG		SZ_2M

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
 * pg_range_alloc() - Make a range.
 * @file: the file
 * @length: bytes, a multiple of the page size
 *
 * Context: Process context, sleeps.
 * Return: the range, busy and without addresses, or NULL without memory.
 */
struct pg_range *pg_range_alloc(struct pg_file *file, u64 length)
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
 * pg_range_free() - Unpin and free.
 * @range: a range that the device does not use and nobody can find
 *
 * Context: Process context, sleeps. Takes mmap_lock of the mm that pinned.
 */
void pg_range_free(struct pg_range *range)
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
 * Context: Process context, sleeps. Takes pg_file.lock.
 * Return: 0, -ERANGE if the device has not so many addresses, -ENOMEM if they
 * are in use.
 */
int pg_range_reserve(struct pg_range *range, u64 align)
{
	struct pg_file *file = range->file;
	const struct pg_session *session = file->session;
	u64 room = session->iova_last - session->iova_start;
	MA_STATE(mas, &file->ranges, 0, 0);
	u64 size;
	int ret;

	align = max_t(u64, align, range->length >= PG_BIG ? PG_BIG : PAGE_SIZE);
	if (check_add_overflow(range->length, align - PAGE_SIZE, &size) || size - 1 > room)
		return -ERANGE;
	/* Not mtree_alloc_range(), which before 6.5 hands out what is in use. */
	mutex_lock(&file->lock);
	mas_lock(&mas);
	ret = mas_empty_area(&mas, session->iova_start, session->iova_last, size);
	mas_unlock(&mas);
	range->base = mas.index;
	if (!ret)
		ret = mtree_insert_range(&file->ranges, range->base, range->base + size - 1, range,
					 GFP_KERNEL_ACCOUNT);
	mutex_unlock(&file->lock);
	if (ret)
		return -ENOMEM;
	range->iova = ALIGN(range->base, align);
	return 0;
}

/**
 * pg_range_publish() - A range may be unmapped from now on.
 * @range: the range
 *
 * Context: Process context. Takes pg_file.lock.
 */
void pg_range_publish(struct pg_range *range)
{
	mutex_lock(&range->file->lock);
	range->busy = false;
	mutex_unlock(&range->file->lock);
}

/**
 * pg_range_drop() - The device does not use a range any more.
 * @range: the range, busy
 *
 * Context: Process context, sleeps. Takes pg_file.lock.
 */
void pg_range_drop(struct pg_range *range)
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
void pg_range_gone(struct pg_msg *msg)
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
