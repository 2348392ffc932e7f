// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: control requests.
 *
 * A request is sent, and answered some time, in any order. Its buffer belongs to
 * the device until then; a waiter that gives up leaves it there. Answers are
 * taken by a work item, so that what depends on one may sleep. Sending never
 * fails: what finds no room on the queue waits in the backlog, and what finds
 * the device gone is answered with -ENODEV.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "peergate_internal.h"

/* How soon to try again when the control queue takes nothing. */
#define PG_RETRY_DELAY	(HZ / 10)

/**
 * pg_status_errno() - What a status is to user space.
 * @status: VIRTIO_PEERGATE_S_*
 *
 * Return: 0 or negative errno.
 */
static int pg_status_errno(u32 status)
{
	switch (status) {
	case VIRTIO_PEERGATE_S_OK:
		return 0;
	case VIRTIO_PEERGATE_S_UNSUPP:
		return -EOPNOTSUPP;
	case VIRTIO_PEERGATE_S_INVAL:
		return -EINVAL;
	case VIRTIO_PEERGATE_S_RANGE:
		return -ERANGE;
	case VIRTIO_PEERGATE_S_NOENT:
		return -ENOENT;
	case VIRTIO_PEERGATE_S_NOMEM:
		return -ENOMEM;
	case VIRTIO_PEERGATE_S_QUOTA:
		return -EDQUOT;
	case VIRTIO_PEERGATE_S_STALE:
	case VIRTIO_PEERGATE_S_LOST:
		return -ESTALE;
	case VIRTIO_PEERGATE_S_REVOKED:
	case VIRTIO_PEERGATE_S_DENIED:
		return -EACCES;
	case VIRTIO_PEERGATE_S_TIMEOUT:
		return -ETIMEDOUT;
	case VIRTIO_PEERGATE_S_BUSY:
		return -EBUSY;
	case VIRTIO_PEERGATE_S_ALREADY:
		return -EALREADY;
	default:
		return -EIO;
	}
}

/**
 * pg_msg_alloc() - Make a request.
 * @opcode: VIRTIO_PEERGATE_OP_*
 * @domain: domain it is about, or 0
 * @session: session it is meant for
 * @body_len: bytes after the header
 * @reply_len: bytes after the answer's header
 *
 * The body is zero. The caller gives its reference back with pg_msg_put().
 *
 * Context: Process context, may sleep.
 * Return: the request, or NULL without memory.
 */
struct pg_msg *pg_msg_alloc(u16 opcode, u32 domain, u32 session, size_t body_len,
			    size_t reply_len)
{
	size_t out_len = sizeof(struct virtio_peergate_control) + body_len;
	size_t in_len = sizeof(struct virtio_peergate_reply) + reply_len;
	struct virtio_peergate_control *control;
	struct pg_msg *msg;

	/* Two parts more than pages: neither begins or ends at a page. */
	if (WARN_ON_ONCE(DIV_ROUND_UP(out_len, PAGE_SIZE) + DIV_ROUND_UP(in_len, PAGE_SIZE) + 2 >
			 PG_MAX_SG))
		return NULL;

	msg = kvzalloc(struct_size(msg, data, out_len + in_len), GFP_KERNEL_ACCOUNT);
	if (!msg)
		return NULL;
	INIT_LIST_HEAD(&msg->node);
	refcount_set(&msg->refs, 1);
	init_completion(&msg->done);
	msg->out_len = out_len;
	msg->in_len = in_len;
	msg->in_min = in_len;

	control = (struct virtio_peergate_control *)msg->data;
	control->opcode = cpu_to_le16(opcode);
	control->domain = cpu_to_le32(domain);
	control->session = cpu_to_le32(session);
	pg_msg_reply(msg)->status = cpu_to_le32(VIRTIO_PEERGATE_S_PENDING);
	return msg;
}

/**
 * pg_msg_put() - Give a reference back.
 * @msg: the request
 *
 * Context: Process context, may sleep.
 */
void pg_msg_put(struct pg_msg *msg)
{
	if (refcount_dec_and_test(&msg->refs))
		kvfree(msg);
}

/**
 * pg_msg_finish() - A request has its answer.
 * @msg: the request; the device's reference goes
 * @error: what became of it
 *
 * Context: Process context, may sleep.
 */
static void pg_msg_finish(struct pg_msg *msg, int error)
{
	msg->error = error;
	if (msg->finish)
		msg->finish(msg);
	complete(&msg->done);
	pg_msg_put(msg);
}

/**
 * pg_msg_answer() - What the device answered.
 * @msg: an answered request
 *
 * Return: 0 or negative errno.
 */
static int pg_msg_answer(struct pg_msg *msg)
{
	struct virtio_peergate_reply *reply = pg_msg_reply(msg);
	u32 room = msg->in_len - sizeof(*reply);
	int error;

	if (msg->used < sizeof(*reply))
		return -EIO;
	error = pg_status_errno(le32_to_cpu(reply->status));
	if (error)
		return error;
	if (msg->used < msg->in_min || le32_to_cpu(reply->length) > room ||
	    le32_to_cpu(reply->length) < msg->in_min - sizeof(*reply))
		return -EIO;
	return 0;
}

/**
 * pg_sg_append() - Describe a buffer.
 * @sg: where to
 * @buf: the buffer, from kvmalloc()
 * @len: its length, not 0
 *
 * Return: how many entries of @sg were filled; the last one ends the list.
 */
static unsigned int pg_sg_append(struct scatterlist *sg, void *buf, size_t len)
{
	unsigned int n = 0;

	if (!is_vmalloc_addr(buf)) {
		sg_set_buf(&sg[n++], buf, len);
		len = 0;
	}
	while (len) {
		size_t part = min_t(size_t, len, PAGE_SIZE - offset_in_page(buf));

		sg_set_page(&sg[n++], vmalloc_to_page(buf), part, offset_in_page(buf));
		buf += part;
		len -= part;
	}
	sg_mark_end(&sg[n - 1]);
	return n;
}

/**
 * pg_control_push() - Put the backlog on the control queue, as far as it fits.
 * @dev: the device
 *
 * Context: Any. Caller holds the control queue's lock and keeps @dev live.
 * Return: whether the device must be notified.
 */
static bool pg_control_push(struct pg_device *dev)
{
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	struct scatterlist *sgs[2];
	struct pg_msg *msg, *next;
	bool added = false;

	assert_spin_locked(&queue->lock);
	list_for_each_entry_safe(msg, next, &dev->backlog, node) {
		sg_init_table(dev->sg, PG_MAX_SG);
		sgs[0] = dev->sg;
		sgs[1] = sgs[0] + pg_sg_append(sgs[0], msg->data, msg->out_len);
		pg_sg_append(sgs[1], msg->data + msg->out_len, msg->in_len);
		if (virtqueue_add_sgs(queue->vq, sgs, 1, 1, msg, GFP_ATOMIC)) {
			/* The next answer makes room, if any is to come. */
			queue_delayed_work(pg_wq, &dev->control_work, PG_RETRY_DELAY);
			break;
		}
		list_del_init(&msg->node);
		added = true;
	}
	return added && virtqueue_kick_prepare(queue->vq);
}

/**
 * pg_msg_send() - Send a request.
 * @dev: the device
 * @msg: the request; the device gets a reference of its own
 *
 * Calls pg_msg.finish itself if the device is gone.
 *
 * Context: Process context. Takes the control queue's lock. Caller holds no lock
 * that pg_msg.finish takes.
 */
void pg_msg_send(struct pg_device *dev, struct pg_msg *msg)
{
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	bool notify = false;
	bool gone;

	refcount_inc(&msg->refs);
	rcu_read_lock();
	spin_lock_irq(&queue->lock);
	gone = dev->state == PG_GONE;
	if (!gone) {
		list_add_tail(&msg->node, &dev->backlog);
		if (pg_is_live(dev))
			notify = pg_control_push(dev);
	}
	spin_unlock_irq(&queue->lock);
	if (notify)
		virtqueue_notify(queue->vq);
	rcu_read_unlock();

	if (gone)
		pg_msg_finish(msg, -ENODEV);
}

/**
 * pg_msg_wait() - Wait for the answer.
 * @dev: the device
 * @msg: a request that was sent
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: what the device answered, as 0 or negative errno; -EINTR, or
 * -ETIMEDOUT after the module's time limit, both with the request still there.
 */
int pg_msg_wait(struct pg_device *dev, struct pg_msg *msg)
{
	unsigned long limit = msecs_to_jiffies(READ_ONCE(pg_control_timeout_ms));
	long left;

	limit += msecs_to_jiffies(msg->drain_ms);
	left = wait_for_completion_killable_timeout(&msg->done,
						    min_t(unsigned long, limit, LONG_MAX));
	if (left > 0)
		return msg->error;
	if (left < 0)
		return -EINTR;
	dev_warn_ratelimited(&dev->dev, "no answer to request %#x in time\n",
			     le16_to_cpu(((struct virtio_peergate_control *)msg->data)->opcode));
	return -ETIMEDOUT;
}

/**
 * pg_request() - Send a request of a file and wait for the answer.
 * @file: the file
 * @opcode: VIRTIO_PEERGATE_OP_*
 * @body: body of the request
 * @body_len: its length
 * @reply: where to put the answer's body if the answer is OK
 * @reply_len: its length
 * @drains: the device answers only when jobs have ended
 *
 * Context: Process context, sleeps; a fatal signal ends the wait.
 * Return: 0 or negative errno.
 */
int pg_request(struct pg_file *file, u16 opcode, const void *body, size_t body_len,
	       void *reply, size_t reply_len, bool drains)
{
	struct pg_msg *msg;
	int ret;

	msg = pg_msg_alloc(opcode, file->domain, file->session->number, body_len, reply_len);
	if (!msg)
		return -ENOMEM;
	memcpy(pg_msg_body(msg), body, body_len);
	if (drains)
		msg->drain_ms = file->session->max_timeout_ms;
	pg_msg_send(file->dev, msg);
	ret = pg_msg_wait(file->dev, msg);
	if (!ret && reply_len)
		memcpy(reply, pg_msg_reply(msg) + 1, reply_len);
	pg_msg_put(msg);
	return ret;
}

/**
 * pg_control_done() - The control queue has answers.
 * @vq: the control queue
 *
 * Context: Interrupt.
 */
void pg_control_done(struct virtqueue *vq)
{
	struct pg_queue *queue = pg_queue_of(vq);
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	if (pg_is_live(queue->dev)) {
		virtqueue_disable_cb(vq);
		mod_delayed_work(pg_wq, &queue->dev->control_work, 0);
	}
	spin_unlock_irqrestore(&queue->lock, flags);
}

/**
 * pg_control_take() - Take the answers that are there.
 * @dev: the device
 * @answered: list to put them into
 *
 * Context: Any. Caller holds the control queue's lock.
 */
static void pg_control_take(struct pg_device *dev, struct list_head *answered)
{
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	struct pg_msg *msg;
	u32 used;

	assert_spin_locked(&queue->lock);
	while ((msg = virtqueue_get_buf(queue->vq, &used))) {
		msg->used = used;
		list_add_tail(&msg->node, answered);
	}
}

/**
 * pg_control_finish() - Finish answered requests.
 * @answered: list of them
 *
 * Context: Process context, may sleep.
 */
static void pg_control_finish(struct list_head *answered)
{
	struct pg_msg *msg, *next;

	list_for_each_entry_safe(msg, next, answered, node) {
		list_del_init(&msg->node);
		pg_msg_finish(msg, pg_msg_answer(msg));
	}
}

/**
 * pg_control_work() - Take answers, and send what waits for room.
 * @work: pg_device.control_work
 *
 * Context: Process context. pg_control_drain() waits for it, so the queue stays.
 */
void pg_control_work(struct work_struct *work)
{
	struct pg_device *dev = container_of(to_delayed_work(work), struct pg_device,
					     control_work);
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	LIST_HEAD(answered);
	bool notify = false;

	spin_lock_irq(&queue->lock);
	if (pg_is_live(dev)) {
		do {
			virtqueue_disable_cb(queue->vq);
			pg_control_take(dev, &answered);
		} while (!virtqueue_enable_cb(queue->vq));
		notify = pg_control_push(dev);
	}
	spin_unlock_irq(&queue->lock);
	if (notify)
		virtqueue_notify(queue->vq);
	pg_control_finish(&answered);
}

/**
 * pg_control_drain() - Finish every request; the device was reset.
 * @dev: the device; gone from here on
 *
 * Context: Process context, may sleep.
 */
void pg_control_drain(struct pg_device *dev)
{
	struct pg_queue *queue = &dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	LIST_HEAD(answered);
	LIST_HEAD(lost);
	struct pg_msg *msg, *next;

	cancel_delayed_work_sync(&dev->control_work);

	spin_lock_irq(&queue->lock);
	/* Pairs with pg_is_gone(): who sees it sees the last completions. */
	smp_store_release(&dev->state, PG_GONE);
	pg_control_take(dev, &answered);
	while ((msg = virtqueue_detach_unused_buf(queue->vq)))
		list_add_tail(&msg->node, &lost);
	list_splice_tail_init(&dev->backlog, &lost);
	spin_unlock_irq(&queue->lock);

	pg_control_finish(&answered);
	list_for_each_entry_safe(msg, next, &lost, node) {
		list_del_init(&msg->node);
		pg_msg_finish(msg, -ENODEV);
	}
}
