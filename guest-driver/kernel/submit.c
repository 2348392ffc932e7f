// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: submission chains.
 *
 * SUBMIT copies descriptors of the program into chains whose header the kernel
 * writes: a program cannot name another's domain. A chain comes back when all of
 * its descriptors have ended, and goes to the file's completion ring then, in the
 * interrupt. So a chain holds one stream only: a stream that waits holds back no
 * completion of another.
 */
#include <linux/nospec.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "peergate_internal.h"

/**
 * struct pg_chain - A submission chain.
 * @file: whose; it holds a reference
 * @records: what the device writes, after @work
 * @header: begins what the device reads
 * @work: descriptors
 */
struct pg_chain {
	struct pg_file *file;
	struct virtio_peergate_completion *records;
	struct virtio_peergate_submit header;
	struct virtio_peergate_work work[];
};

/**
 * pg_chain_complete() - A chain came back, or never will.
 * @chain: the chain; it is freed
 * @lost: the device was reset before it gave the chain back
 *
 * Context: Any. Takes pg_ring.lock; caller holds the queue's lock.
 */
static void pg_chain_complete(struct pg_chain *chain, bool lost)
{
	unsigned int i, count = le16_to_cpu(chain->header.count);
	struct pg_file *file = chain->file;
	struct pg_ring *ring = file->ring;
	unsigned long flags;

	spin_lock_irqsave(&ring->lock, flags);
	for (i = 0; i < count; i++) {
		const struct virtio_peergate_completion *record = &chain->records[i];
		u32 status = le32_to_cpu(record->status);

		if (status == VIRTIO_PEERGATE_S_PENDING)
			status = lost ? VIRTIO_PEERGATE_S_LOST : VIRTIO_PEERGATE_S_DEVERR;
		ring->entries[(ring->tail + i) & ring->mask] = (struct peergate_completion) {
			.cookie = le64_to_cpu(chain->work[i].cookie),
			.bytes = le64_to_cpu(record->bytes),
			.fault_address = le64_to_cpu(record->fault_address),
			.path = record->path,
			.reason = record->reason,
			.fault_reason = record->fault_reason,
			.status = status,
		};
	}
	ring->reserved -= count;
	WRITE_ONCE(ring->tail, ring->tail + count);
	/* Pairs with the program's acquire: it sees the entries. */
	smp_store_release(&ring->area->tail, ring->tail);
	spin_unlock_irqrestore(&ring->lock, flags);

	wake_up_poll(&file->ring_wait, EPOLLPRI);
	kfree(chain);
	pg_file_put(file);
}

/**
 * pg_submit_done() - A submission queue has chains that came back.
 * @vq: the queue
 *
 * Context: Interrupt. Takes the queue's lock.
 */
void pg_submit_done(struct virtqueue *vq)
{
	struct pg_queue *queue = pg_queue_of(vq);
	struct pg_chain *chain;
	unsigned long flags;
	unsigned int used;

	spin_lock_irqsave(&queue->lock, flags);
	if (!pg_is_live(queue->dev))
		goto out;
	do {
		virtqueue_disable_cb(vq);
		while ((chain = virtqueue_get_buf(vq, &used)))
			pg_chain_complete(chain, false);
	} while (!virtqueue_enable_cb(vq));
out:
	spin_unlock_irqrestore(&queue->lock, flags);
}

/**
 * pg_submit_drain() - Complete every chain of a queue; the device was reset.
 * @queue: the queue
 *
 * What the device finished in time completes as it ended, the rest as LOST.
 *
 * Context: Process context. Takes the queue's lock.
 */
void pg_submit_drain(struct pg_queue *queue)
{
	struct pg_chain *chain;
	unsigned int used;

	spin_lock_irq(&queue->lock);
	while ((chain = virtqueue_get_buf(queue->vq, &used)))
		pg_chain_complete(chain, false);
	while ((chain = virtqueue_detach_unused_buf(queue->vq)))
		pg_chain_complete(chain, true);
	spin_unlock_irq(&queue->lock);
}

/**
 * pg_work_copy() - Copy a descriptor from the caller.
 * @wire: where to
 * @user: the descriptor
 *
 * Context: Process context, may fault.
 * Return: 0, -EFAULT, or -EINVAL if a reserved field is not zero. What else is in
 * it is the device's to judge.
 */
static int pg_work_copy(struct virtio_peergate_work *wire, const struct peergate_work __user *user)
{
	struct peergate_work work;

	if (copy_from_user(&work, user, sizeof(work)))
		return -EFAULT;
	if (work.reserved0 || work.reserved)
		return -EINVAL;
	*wire = (struct virtio_peergate_work) {
		.opcode = cpu_to_le16(work.opcode),
		.flags = cpu_to_le32(work.flags),
		.stream = cpu_to_le32(work.stream),
		.initiator = cpu_to_le32(work.initiator),
		.cookie = cpu_to_le64(work.cookie),
		.source = cpu_to_le64(work.source),
		.destination = cpu_to_le64(work.destination),
		.length = cpu_to_le64(work.length),
		.timeout_ms = cpu_to_le32(work.timeout_ms),
		.operand = cpu_to_le64(work.operand),
	};
	return 0;
}

/**
 * pg_chain_build() - Make a chain of descriptors of the caller.
 * @file: the file
 * @user: the descriptors
 * @count: how many are wanted
 *
 * Context: Process context, may fault, sleeps.
 * Return: the chain, which ends before the first descriptor of another stream and
 * before the first that cannot be taken, or an error pointer if that is the first
 * of all.
 */
static struct pg_chain *pg_chain_build(struct pg_file *file,
				       const struct peergate_work __user *user, unsigned int count)
{
	struct pg_chain *chain;
	unsigned int i;
	int ret = 0;

	chain = kmalloc(struct_size(chain, work, count) + count * sizeof(*chain->records),
			GFP_KERNEL_ACCOUNT);
	if (!chain)
		return ERR_PTR(-ENOMEM);
	for (i = 0; i < count; i++) {
		ret = pg_work_copy(&chain->work[i], &user[i]);
		if (ret || chain->work[i].stream != chain->work[0].stream)
			break;
	}
	if (!i) {
		kfree(chain);
		return ERR_PTR(ret);
	}
	chain->file = file;
	chain->header = (struct virtio_peergate_submit) {
		.version = cpu_to_le16(file->session->version),
		.count = cpu_to_le16(i),
		.domain = cpu_to_le32(file->domain),
		.session = cpu_to_le32(file->session->number),
	};
	chain->records = (struct virtio_peergate_completion *)&chain->work[i];
	memset(chain->records, 0, i * sizeof(*chain->records));
	while (i--)
		chain->records[i].status = cpu_to_le32(VIRTIO_PEERGATE_S_PENDING);
	return chain;
}

/**
 * pg_chain_add() - Put a chain on a submission queue.
 * @queue: the queue
 * @chain: the chain; not to be used after if 0 is returned
 *
 * Context: Process context. Takes the queue's lock.
 * Return: 0, -EBUSY if the queue is full, -ENODEV or another negative errno.
 */
static int pg_chain_add(struct pg_queue *queue, struct pg_chain *chain)
{
	unsigned int count = le16_to_cpu(chain->header.count);
	struct scatterlist out, in, *sgs[] = { &out, &in };
	bool notify = false;
	int ret = -ENODEV;

	sg_init_one(&out, &chain->header, sizeof(chain->header) + count * sizeof(*chain->work));
	sg_init_one(&in, chain->records, count * sizeof(*chain->records));

	pg_file_get(chain->file);
	rcu_read_lock();
	if (pg_is_live(queue->dev)) {
		spin_lock_irq(&queue->lock);
		ret = virtqueue_add_sgs(queue->vq, sgs, 1, 1, chain, GFP_ATOMIC);
		if (!ret)
			notify = virtqueue_kick_prepare(queue->vq);
		spin_unlock_irq(&queue->lock);
		if (notify)
			virtqueue_notify(queue->vq);
	}
	rcu_read_unlock();
	if (ret)
		pg_file_put(chain->file);
	return ret == -ENOSPC ? -EBUSY : ret;
}

/**
 * pg_submit() - PEERGATE_SUBMIT.
 * @file: the file
 * @data: &struct peergate_submit
 *
 * Context: Process context, may fault, does not wait for the device.
 * Return: 0 with how many were taken, at least one, or negative errno with none.
 */
int pg_submit(struct pg_file *file, void *data)
{
	struct pg_ring *ring = pg_ring_of(file);
	struct peergate_submit *arg = data;
	const struct peergate_work __user *user = u64_to_user_ptr(arg->work);
	u32 queues = file->dev->queue_count - VIRTIO_PEERGATE_VQ_SUBMIT;
	struct pg_queue *queue;
	u32 room, taken = 0;
	int ret = 0;

	if (arg->flags || !arg->count || arg->queue >= queues || !ring)
		return -EINVAL;
	queue = &file->dev->queues[VIRTIO_PEERGATE_VQ_SUBMIT +
				   array_index_nospec(arg->queue, queues)];
	room = pg_ring_reserve(ring, arg->count);
	if (!room)
		return -EBUSY;
	while (taken < room) {
		u32 count = min(room - taken, file->session->max_batch);
		struct pg_chain *chain = pg_chain_build(file, user + taken, count);
		u32 built;

		if (IS_ERR(chain)) {
			ret = PTR_ERR(chain);
			break;
		}
		built = le16_to_cpu(chain->header.count);
		ret = pg_chain_add(queue, chain);
		if (ret) {
			kfree(chain);
			break;
		}
		taken += built;
	}
	pg_ring_unreserve(ring, room - taken);
	arg->count = taken;
	return taken ? 0 : ret;
}
