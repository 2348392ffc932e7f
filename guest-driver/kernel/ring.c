// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: the completion ring.
 *
 * Each descriptor is promised an entry before it is taken, so the interrupt that
 * brings a chain back always has room. The program takes entries out by moving
 * peergate_ring.head; whatever it writes there, the kernel writes inside the ring
 * and nowhere else, and an entry is overwritten only if the program said that it
 * has read it.
 */
#include <linux/hrtimer.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "peergate_internal.h"

#define PG_RING_MIN	64
#define PG_RING_MAX	65536

/**
 * struct pg_waiter - Someone who waits for completions.
 * @wait: in pg_file.ring_wait
 * @file: the file
 * @count: entries that must be in the ring
 */
struct pg_waiter {
	struct wait_queue_entry wait;
	struct pg_file *file;
	u32 count;
};

/**
 * pg_ring_setup() - PEERGATE_RING.
 * @file: the file
 * @data: &struct peergate_ring_setup
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
int pg_ring_setup(struct pg_file *file, void *data)
{
	struct peergate_ring_setup *arg = data;
	struct pg_ring *ring;

	BUILD_BUG_ON(sizeof(struct peergate_completion) != 32 ||
		     sizeof(struct peergate_ring) % sizeof(struct peergate_completion));
	if (arg->flags || arg->reserved || !is_power_of_2(arg->entries) ||
	    arg->entries < PG_RING_MIN || arg->entries > PG_RING_MAX)
		return -EINVAL;
	if (READ_ONCE(file->ring))
		return -EALREADY;

	ring = kzalloc_obj(*ring, GFP_KERNEL_ACCOUNT);
	if (!ring)
		return -ENOMEM;
	spin_lock_init(&ring->lock);
	ring->mask = arg->entries - 1;
	ring->length = PAGE_ALIGN(sizeof(*ring->area) + (size_t)arg->entries *
				  sizeof(*ring->entries));
	ring->area = vmalloc_user(ring->length);
	if (!ring->area) {
		kfree(ring);
		return -ENOMEM;
	}
	ring->entries = (struct peergate_completion *)(ring->area + 1);
	ring->area->mask = ring->mask;
	ring->area->entry_offset = sizeof(*ring->area);
	if (cmpxchg(&file->ring, NULL, ring)) {
		vfree(ring->area);
		kfree(ring);
		return -EALREADY;
	}
	arg->length = ring->length;
	return 0;
}

/**
 * pg_ring_destroy() - Free the completion ring.
 * @file: the file, used by nobody
 *
 * Context: Process context, sleeps.
 */
void pg_ring_destroy(struct pg_file *file)
{
	if (file->ring) {
		vfree(file->ring->area);
		kfree(file->ring);
	}
}

/**
 * __pg_ring_unread() - Entries that the program has not read.
 * @ring: the ring
 *
 * Context: Any.
 * Return: how many; the size of the ring if what the program wrote is nonsense.
 */
static u32 __pg_ring_unread(struct pg_ring *ring)
{
	/* Pairs with the program's release: it has read what we may overwrite. */
	u32 head = smp_load_acquire(&ring->area->head);

	return min(READ_ONCE(ring->tail) - head, ring->mask + 1);
}

/**
 * pg_ring_unread() - Entries of a file's ring that the program has not read.
 * @file: the file
 *
 * Context: Any.
 * Return: how many, 0 if there is no ring.
 */
u32 pg_ring_unread(struct pg_file *file)
{
	struct pg_ring *ring = pg_ring_of(file);

	return ring ? __pg_ring_unread(ring) : 0;
}

/**
 * pg_ring_reserve() - Promise entries.
 * @ring: the ring
 * @count: how many are wanted
 *
 * Context: Process context. Takes pg_ring.lock.
 * Return: how many are promised.
 */
u32 pg_ring_reserve(struct pg_ring *ring, u32 count)
{
	unsigned long flags;

	spin_lock_irqsave(&ring->lock, flags);
	count = min(count, ring->mask + 1 - min(ring->mask + 1,
						__pg_ring_unread(ring) + ring->reserved));
	ring->reserved += count;
	spin_unlock_irqrestore(&ring->lock, flags);
	return count;
}

/**
 * pg_ring_unreserve() - Take a promise back.
 * @ring: the ring
 * @count: how many entries were not needed
 *
 * Context: Process context. Takes pg_ring.lock.
 */
void pg_ring_unreserve(struct pg_ring *ring, u32 count)
{
	unsigned long flags;

	spin_lock_irqsave(&ring->lock, flags);
	ring->reserved -= count;
	spin_unlock_irqrestore(&ring->lock, flags);
}

/**
 * pg_waiter_wake() - The ring got entries, or the device is gone.
 * @wait: pg_waiter.wait
 * @mode: passed on
 * @sync: passed on
 * @key: passed on
 *
 * Context: Any. Lets sleep who would only go back to sleep.
 * Return: whether someone was woken.
 */
static int pg_waiter_wake(struct wait_queue_entry *wait, unsigned int mode, int sync, void *key)
{
	struct pg_waiter *waiter = container_of(wait, struct pg_waiter, wait);

	if (pg_ring_unread(waiter->file) < waiter->count && !pg_is_gone(waiter->file->dev))
		return 0;
	return default_wake_function(wait, mode, sync, key);
}

/**
 * pg_wait() - PEERGATE_WAIT.
 * @file: the file
 * @data: &struct peergate_wait
 *
 * Context: Process context, sleeps; a signal ends the wait.
 * Return: 0, -ETIMEDOUT, -EINTR, -EINVAL, or -ENODEV if the device is gone and so
 * many entries will never come.
 */
int pg_wait(struct pg_file *file, void *data)
{
	struct pg_ring *ring = pg_ring_of(file);
	struct peergate_wait *arg = data;
	struct pg_waiter waiter = { .file = file, .count = arg->count };
	ktime_t deadline = min_t(u64, arg->deadline_ns, KTIME_MAX);
	bool late = !deadline;
	int ret;

	if (arg->flags || arg->reserved || !ring || arg->count > ring->mask + 1)
		return -EINVAL;
	init_waitqueue_func_entry(&waiter.wait, pg_waiter_wake);
	waiter.wait.private = current;
	INIT_LIST_HEAD(&waiter.wait.entry);
	for (;;) {
		prepare_to_wait(&file->ring_wait, &waiter.wait, TASK_INTERRUPTIBLE);
		/* Gone is looked at first: it becomes true after the last entry. */
		ret = pg_is_gone(file->dev) ? -ENODEV : 0;
		if (pg_ring_unread(file) >= arg->count) {
			ret = 0;
			break;
		}
		if (!ret && signal_pending(current))
			ret = -EINTR;
		if (!ret && late)
			ret = -ETIMEDOUT;
		if (ret)
			break;
		late = !schedule_hrtimeout(&deadline, HRTIMER_MODE_ABS);
	}
	finish_wait(&file->ring_wait, &waiter.wait);
	return ret;
}
