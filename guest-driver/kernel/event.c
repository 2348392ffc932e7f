// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: events.
 *
 * Buffers are kept on the event queue. What arrives goes to the fifo of the file
 * whose domain it is about; what is about no domain goes to all. A file that
 * does not read loses the newest, and is told how many.
 */
#include <linux/poll.h>
#include <linux/slab.h>

#include "peergate_internal.h"

/**
 * pg_event_post() - Give the device a buffer for an event.
 * @queue: the event queue
 * @event: the buffer
 *
 * Context: Any. Caller holds the queue's lock. Without memory for the queue's
 * own needs the buffer is lost, which cannot happen with one part a buffer.
 */
static void pg_event_post(struct pg_queue *queue, struct virtio_peergate_event *event)
{
	struct scatterlist sg;

	assert_spin_locked(&queue->lock);
	sg_init_one(&sg, event, sizeof(*event));
	virtqueue_add_inbuf(queue->vq, &sg, 1, event, GFP_ATOMIC);
}

/**
 * pg_events_post() - Give the device as many buffers as the queue holds.
 * @dev: the device, ready
 *
 * Context: Process context. Takes the event queue's lock.
 */
void pg_events_post(struct pg_device *dev)
{
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_EVENT];
	unsigned int i, count;

	spin_lock_irq(&queue->lock);
	count = min(PG_EVENT_BUFFERS, virtqueue_get_vring_size(queue->vq));
	for (i = 0; i < count; i++)
		pg_event_post(queue, &dev->events[i]);
	virtqueue_kick(queue->vq);
	spin_unlock_irq(&queue->lock);
}

/**
 * pg_event_push() - Put an event into a file's fifo.
 * @file: the file
 * @event: the event
 *
 * Context: Interrupt. Takes pg_file.event_lock.
 */
static void pg_event_push(struct pg_file *file, const struct peergate_event *event)
{
	spin_lock(&file->event_lock);
	if (!kfifo_put(&file->events, *event))
		file->events_dropped++;
	spin_unlock(&file->event_lock);
	wake_up_poll(&file->event_wait, EPOLLIN | EPOLLRDNORM);
}

/**
 * pg_event_dispatch() - An event arrived.
 * @dev: the device
 * @wire: the event
 *
 * Context: Interrupt. Takes the xa_lock of pg_device.files, under which files
 * stay.
 */
static void pg_event_dispatch(struct pg_device *dev, const struct virtio_peergate_event *wire)
{
	u32 domain = le32_to_cpu(wire->domain);
	struct peergate_event event = {
		.kind = le16_to_cpu(wire->kind),
		.reason = wire->reason,
		.access = wire->access,
		.session = le32_to_cpu(wire->session),
		.seq = le64_to_cpu(wire->seq),
		.dropped_total = le64_to_cpu(wire->dropped_total),
		.accessor = le32_to_cpu(wire->accessor),
		.owner = le32_to_cpu(wire->owner),
		.stream = le32_to_cpu(wire->stream),
		.address = le64_to_cpu(wire->address),
		.cookie = le64_to_cpu(wire->cookie),
		.value = le64_to_cpu(wire->value),
	};
	struct pg_file *file;
	unsigned long index;

	xa_lock(&dev->files);
	if (domain) {
		file = xa_load(&dev->files, domain);
		if (file && file->session->number == event.session)
			pg_event_push(file, &event);
	} else {
		xa_for_each(&dev->files, index, file)
			if (file->session->number == event.session)
				pg_event_push(file, &event);
	}
	xa_unlock(&dev->files);
}

/**
 * pg_event_done() - The event queue has events.
 * @vq: the event queue
 *
 * Context: Interrupt. Takes the queue's lock.
 */
void pg_event_done(struct virtqueue *vq)
{
	struct pg_queue *queue = pg_queue_of(vq);
	struct virtio_peergate_event *event;
	unsigned long flags;
	unsigned int used;

	spin_lock_irqsave(&queue->lock, flags);
	if (!pg_is_live(queue->dev))
		goto out;
	do {
		virtqueue_disable_cb(vq);
		while ((event = virtqueue_get_buf(vq, &used))) {
			if (used == sizeof(*event))
				pg_event_dispatch(queue->dev, event);
			pg_event_post(queue, event);
		}
	} while (!virtqueue_enable_cb(vq));
	virtqueue_kick(vq);
out:
	spin_unlock_irqrestore(&queue->lock, flags);
}

/**
 * pg_event_pop() - Take an event out of a file's fifo.
 * @file: the file
 * @event: where to put it
 *
 * Context: Process context. Takes pg_file.event_lock.
 * Return: whether there was one.
 */
bool pg_event_pop(struct pg_file *file, struct peergate_event *event)
{
	bool found;

	spin_lock_irq(&file->event_lock);
	found = kfifo_get(&file->events, event);
	if (found)
		event->dropped_total += file->events_dropped;
	spin_unlock_irq(&file->event_lock);
	return found;
}

/**
 * pg_event_pending() - Whether read() has an event.
 * @file: the file
 *
 * Context: Any.
 * Return: whether it has.
 */
bool pg_event_pending(struct pg_file *file)
{
	return !kfifo_is_empty(&file->events);
}
