// SPDX-License-Identifier: GPL-2.0
/*
 * Peergate driver: /dev/peergateN.
 *
 * Opening the file makes a domain and attaches every endpoint to it; closing it
 * asks the device to end the domain and waits for nothing. The file's memory is
 * given up when the device has answered that, and every chain of the file came
 * back.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#include "peergate_internal.h"

/**
 * pg_file_free() - Nothing of the file is in the device any more.
 * @work: pg_file.free_work
 *
 * Context: Process context, sleeps.
 */
static void pg_file_free(struct work_struct *work)
{
	struct pg_file *file = container_of(work, struct pg_file, free_work);
	struct pg_device *dev = file->dev;

	if (file->domain) {
		xa_erase_irq(&dev->files, file->domain);
		atomic_dec(&dev->domains);
		atomic_dec(&dev->closing);
		wake_up_all(&dev->domain_wait);
	}
	pg_mem_destroy(file);
	pg_ring_destroy(file);
	kfifo_free(&file->events);
	if (file->detach)
		pg_msg_put(file->detach);
	kfree(file);
	put_device(&dev->dev);
}

/**
 * pg_file_release() - The last reference is gone.
 * @refs: pg_file.refs
 *
 * Context: Any, interrupts too.
 */
void pg_file_release(struct kref *refs)
{
	struct pg_file *file = container_of(refs, struct pg_file, refs);

	queue_work(pg_wq, &file->free_work);
}

/**
 * pg_detach_done() - The device answered a DETACH.
 * @msg: the request
 *
 * If it refused to end the domain it may still reach the pinned memory, which
 * then stays until the device is reset.
 *
 * Context: Process context.
 */
static void pg_detach_done(struct pg_msg *msg)
{
	struct pg_file *file = msg->owner;
	struct pg_queue *queue = &file->dev->queues[VIRTIO_PEERGATE_VQ_CONTROL];
	bool stranded = false;

	switch (msg->error) {
	case 0:
	case -ENOENT:	/* it never came into being */
	case -ESTALE:	/* it went with the device's state */
	case -ENODEV:	/* the device was reset */
		break;
	default:
		dev_err_ratelimited(&file->dev->dev, "device does not end domain %u: %d\n",
				    file->domain, msg->error);
		spin_lock_irq(&queue->lock);
		if (file->dev->state != PG_GONE) {
			list_add_tail(&file->node, &file->dev->stranded);
			stranded = true;
		}
		spin_unlock_irq(&queue->lock);
	}
	if (!stranded)
		pg_file_put(file);
}

/**
 * pg_file_close() - End the domain.
 * @file: the file; the reference of the open file goes to the request
 *
 * Context: Process context.
 */
static void pg_file_close(struct pg_file *file)
{
	atomic_inc(&file->dev->closing);
	pg_msg_send(file->dev, file->detach);
}

/**
 * pg_domain_reserve() - Count a domain, or wait for one that is about to end.
 * @dev: the device
 *
 * Context: Process context, sleeps for the module's time limit; a fatal signal
 * ends the wait.
 * Return: 0, -EDQUOT, -ENODEV or -EINTR.
 */
static int pg_domain_reserve(struct pg_device *dev)
{
	unsigned long limit = msecs_to_jiffies(READ_ONCE(pg_control_timeout_ms));
	bool got = false;

	if (wait_event_killable_timeout(dev->domain_wait, !pg_is_live(dev) ||
					(got = atomic_add_unless(&dev->domains, 1,
								 dev->max_domains)) ||
					!atomic_read(&dev->closing), limit) < 0)
		return -EINTR;
	/* The last one may have ended between the two looks of the condition. */
	if (got || atomic_add_unless(&dev->domains, 1, dev->max_domains))
		return 0;
	return pg_is_live(dev) ? -EDQUOT : -ENODEV;
}

/**
 * pg_file_alloc() - Make the object of an open file.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: the object, with a domain that the device does not know yet, or an
 * error pointer.
 */
static struct pg_file *pg_file_alloc(struct pg_device *dev)
{
	struct virtio_peergate_attach *attach;
	struct pg_file *file;
	u32 domain;
	int ret;

	file = kzalloc_obj(*file);
	if (!file)
		return ERR_PTR(-ENOMEM);
	kref_init(&file->refs);
	file->dev = dev;
	file->session = READ_ONCE(dev->session);
	INIT_WORK(&file->free_work, pg_file_free);
	INIT_LIST_HEAD(&file->node);
	mutex_init(&file->lock);
	pg_mem_init(file);
	init_waitqueue_head(&file->ring_wait);
	spin_lock_init(&file->event_lock);
	INIT_KFIFO(file->events);
	init_waitqueue_head(&file->event_wait);
	get_device(&dev->dev);

	ret = kfifo_alloc(&file->events, PG_EVENT_FIFO, GFP_KERNEL_ACCOUNT);
	if (ret)
		goto err_put;
	file->detach = pg_msg_alloc(VIRTIO_PEERGATE_OP_DETACH, 0, file->session, sizeof(*attach),
				    0);
	if (!file->detach) {
		ret = -ENOMEM;
		goto err_put;
	}
	ret = pg_domain_reserve(dev);
	if (ret)
		goto err_put;
	/* Numbers are not reused soon: late events find no wrong reader. */
	ret = xa_alloc_cyclic_irq(&dev->files, &domain, file, XA_LIMIT(1, INT_MAX),
				  &dev->next_domain, GFP_KERNEL);
	if (ret) {
		atomic_dec(&dev->domains);
		goto err_put;
	}
	file->domain = domain;
	pg_msg_set_domain(file->detach, domain);
	attach = pg_msg_body(file->detach);
	attach->endpoint = cpu_to_le32(VIRTIO_PEERGATE_ENDPOINT_ALL);
	file->detach->drains = true;
	file->detach->finish = pg_detach_done;
	file->detach->owner = file;
	return file;

err_put:
	pg_file_put(file);
	return ERR_PTR(ret);
}

/**
 * pg_file_attach() - Attach every endpoint to the file's domain.
 * @file: the file
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno; some endpoints may be attached then.
 */
static int pg_file_attach(struct pg_file *file)
{
	struct virtio_peergate_attach attach = {};
	unsigned int i;
	int ret = 0;

	for (i = 0; !ret && i < file->dev->endpoint_count; i++) {
		attach.endpoint = cpu_to_le32(file->dev->endpoints[i].endpoint);
		ret = pg_request(file, VIRTIO_PEERGATE_OP_ATTACH, &attach, sizeof(attach), NULL, 0,
				 false);
	}
	return ret;
}

/**
 * pg_open() - A program opens the device.
 * @inode: /dev/peergateN
 * @filp: the open file
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_open(struct inode *inode, struct file *filp)
{
	struct pg_device *dev = container_of(inode->i_cdev, struct pg_device, cdev);
	struct pg_file *file;
	int ret;

	if (!pg_is_live(dev))
		return -ENODEV;
	file = pg_file_alloc(dev);
	if (IS_ERR(file))
		return PTR_ERR(file);
	ret = pg_file_attach(file);
	if (ret) {
		pg_file_close(file);
		return ret;
	}
	filp->private_data = file;
	return stream_open(inode, filp);
}

/**
 * pg_release() - The last user of an open file is gone.
 * @inode: /dev/peergateN
 * @filp: the file
 *
 * Context: Process context.
 * Return: 0.
 */
static int pg_release(struct inode *inode, struct file *filp)
{
	pg_file_close(filp->private_data);
	return 0;
}

/**
 * pg_read() - Read events.
 * @filp: the file
 * @buf: where to
 * @count: bytes of room
 * @ppos: not used
 *
 * Context: Process context, sleeps; a signal ends the wait.
 * Return: bytes of whole events read, or negative errno.
 */
static ssize_t pg_read(struct file *filp, char __user *buf, size_t count, loff_t *ppos)
{
	struct pg_file *file = filp->private_data;
	struct peergate_event event;
	size_t done = 0;
	int ret;

	if (count < sizeof(event))
		return -EINVAL;
	for (;;) {
		while (count - done >= sizeof(event) && pg_event_pop(file, &event)) {
			if (copy_to_user(buf + done, &event, sizeof(event)))
				return done ?: -EFAULT;
			done += sizeof(event);
		}
		if (done)
			return done;
		if (!pg_is_live(file->dev))
			return -ENODEV;
		if (filp->f_flags & O_NONBLOCK)
			return -EAGAIN;
		ret = wait_event_interruptible(file->event_wait, pg_event_pending(file) ||
					       !pg_is_live(file->dev));
		if (ret)
			return ret;
	}
}

/**
 * pg_poll() - What can be had without waiting.
 * @filp: the file
 * @table: whom to wake later
 *
 * Context: Process context.
 * Return: EPOLLIN and EPOLLRDNORM for events, EPOLLPRI for completions, EPOLLHUP
 * when the device is gone.
 */
static __poll_t pg_poll(struct file *filp, poll_table *table)
{
	struct pg_file *file = filp->private_data;
	__poll_t mask = 0;

	poll_wait(filp, &file->event_wait, table);
	poll_wait(filp, &file->ring_wait, table);
	if (pg_event_pending(file))
		mask |= EPOLLIN | EPOLLRDNORM;
	if (pg_ring_unread(file))
		mask |= EPOLLPRI;
	if (!pg_is_live(file->dev))
		mask |= EPOLLHUP;
	return mask;
}

/**
 * pg_mmap() - Map the completion ring.
 * @filp: the file
 * @vma: where to
 *
 * Context: Process context, mmap_lock held.
 * Return: 0 or negative errno.
 */
static int pg_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct pg_file *file = filp->private_data;
	struct pg_ring *ring = smp_load_acquire(&file->ring);

	if (!ring || vma->vm_pgoff != PEERGATE_MMAP_RING >> PAGE_SHIFT ||
	    vma->vm_end - vma->vm_start > ring->length || !(vma->vm_flags & VM_SHARED) ||
	    vma->vm_flags & VM_EXEC)
		return -EINVAL;
	vm_flags_clear(vma, VM_MAYEXEC);
	return remap_vmalloc_range(vma, ring->area, 0);
}

/**
 * pg_info() - PEERGATE_INFO.
 * @file: the file
 * @data: &struct peergate_info
 *
 * Return: 0 or -EINVAL.
 */
static int pg_info(struct pg_file *file, void *data)
{
	struct pg_device *dev = file->dev;
	struct peergate_info *info = data;

	if (info->flags)
		return -EINVAL;
	*info = (struct peergate_info) {
		.size = info->size,
		.version = dev->version,
		.session = READ_ONCE(dev->session),
		.domain = file->domain,
		.interrupt = dev->interrupt,
		.iova_start = dev->iova_start,
		.iova_last = dev->iova_last,
		.page_size = PAGE_SIZE,
		.max_batch = dev->max_batch,
		.endpoints = dev->endpoint_count,
		.stream_credits = dev->stream_credits,
		.max_in_flight = dev->max_in_flight,
		.max_streams = dev->max_streams,
		.default_timeout_ms = dev->default_timeout_ms,
		.max_timeout_ms = dev->max_timeout_ms,
		.submit_queues = dev->queue_count - VIRTIO_PEERGATE_VQ_SUBMIT,
		.pinned_bytes = (u64)atomic64_read(&file->pinned) << PAGE_SHIFT,
		.max_domains = dev->max_domains,
		.max_mappings = dev->max_mappings,
	};
	return 0;
}

/**
 * pg_endpoint() - PEERGATE_ENDPOINT.
 * @file: the file
 * @data: &struct peergate_endpoint
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_endpoint(struct pg_file *file, void *data)
{
	const struct virtio_peergate_probe_reply *probe;
	const struct virtio_peergate_endpoint *wire;
	struct peergate_endpoint *arg = data;
	struct pg_device *dev = file->dev;
	u32 size = arg->size;
	struct pg_msg *msg;
	int ret;

	if (arg->index >= dev->endpoint_count)
		return -ENOENT;
	*arg = dev->endpoints[arg->index];
	arg->size = size;
	ret = pg_probe_limits(dev, &msg);
	if (ret)
		return ret;
	probe = (const void *)(pg_msg_reply(msg) + 1);
	wire = (const struct virtio_peergate_endpoint *)(probe + 1) + arg->index;
	arg->memory_free = le64_to_cpu(wire->memory_free);
	pg_msg_put(msg);
	return 0;
}

/**
 * pg_peer() - PEERGATE_PEER.
 * @file: the file
 * @data: &struct peergate_peer
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_peer(struct pg_file *file, void *data)
{
	static const u16 opcodes[] = {
		[PEERGATE_PEER_ENABLE] = VIRTIO_PEERGATE_OP_PEER_ENABLE,
		[PEERGATE_PEER_DISABLE] = VIRTIO_PEERGATE_OP_PEER_DISABLE,
		[PEERGATE_PEER_QUERY] = VIRTIO_PEERGATE_OP_PEER_QUERY,
	};
	struct peergate_peer *arg = data;
	struct virtio_peergate_peer body = {
		.accessor = cpu_to_le32(arg->accessor),
		.owner = cpu_to_le32(arg->owner),
		.rights = cpu_to_le32(arg->op == PEERGATE_PEER_QUERY ? 0 : arg->rights),
	};
	struct virtio_peergate_peer_reply reply;
	int ret;

	if (arg->op >= ARRAY_SIZE(opcodes) || !opcodes[arg->op])
		return -EOPNOTSUPP;
	ret = pg_request(file, opcodes[arg->op], &body, sizeof(body), &reply, sizeof(reply),
			 arg->op == PEERGATE_PEER_DISABLE);
	if (ret)
		return ret;
	arg->rights = le32_to_cpu(reply.rights);
	arg->path = le16_to_cpu(reply.path);
	arg->reason = le16_to_cpu(reply.reason);
	return 0;
}

/**
 * pg_stream_reset() - Clear a stream's error.
 * @file: the file
 * @arg: argument of PEERGATE_STREAM
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream_reset(struct pg_file *file, struct peergate_stream *arg)
{
	struct virtio_peergate_stream_reset body = {
		.stream = cpu_to_le32(arg->stream),
	};

	if (arg->flags || arg->cookie)
		return -EINVAL;
	arg->cancelled = 0;
	arg->running = 0;
	return pg_request(file, VIRTIO_PEERGATE_OP_STREAM_RESET, &body, sizeof(body), NULL, 0,
			  false);
}

/**
 * pg_stream_cancel() - Cancel work.
 * @file: the file
 * @arg: argument of PEERGATE_STREAM
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream_cancel(struct pg_file *file, struct peergate_stream *arg)
{
	bool all = arg->flags & PEERGATE_CANCEL_ALL;
	struct virtio_peergate_cancel body = {
		.stream = cpu_to_le32(arg->stream),
		.flags = cpu_to_le32(all ? VIRTIO_PEERGATE_CANCEL_STREAM : 0),
		.cookie = cpu_to_le64(arg->cookie),
	};
	struct virtio_peergate_cancel_reply reply;
	int ret;

	if (arg->flags & ~PEERGATE_CANCEL_ALL)
		return -EINVAL;
	ret = pg_request(file, VIRTIO_PEERGATE_OP_CANCEL, &body, sizeof(body), &reply,
			 sizeof(reply), false);
	if (ret)
		return ret;
	arg->cancelled = le32_to_cpu(reply.cancelled);
	arg->running = le32_to_cpu(reply.running);
	return 0;
}

/**
 * pg_stream() - PEERGATE_STREAM.
 * @file: the file
 * @data: &struct peergate_stream
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static int pg_stream(struct pg_file *file, void *data)
{
	struct peergate_stream *arg = data;

	switch (arg->op) {
	case PEERGATE_STREAM_RESET:
		return pg_stream_reset(file, arg);
	case PEERGATE_STREAM_CANCEL:
		return pg_stream_cancel(file, arg);
	default:
		return -EOPNOTSUPP;
	}
}

/* Argument of any ioctl. */
union pg_arg {
	__u32 size;
	struct peergate_info info;
	struct peergate_endpoint endpoint;
	struct peergate_ring_setup ring;
	struct peergate_map map;
	struct peergate_unmap unmap;
	struct peergate_alloc alloc;
	struct peergate_free free;
	struct peergate_peer peer;
	struct peergate_submit submit;
	struct peergate_wait wait;
	struct peergate_stream stream;
};

/**
 * struct pg_op - An ioctl.
 * @cmd: its number; a program may have a structure of another size
 * @size: size of the structure that this kernel knows
 * @min_size: size of the oldest structure
 * @fn: what it does, with a pointer to the structure
 * @undo: takes back what @fn did when the caller cannot be told, or NULL
 */
struct pg_op {
	unsigned int cmd;
	u16 size;
	u16 min_size;
	int (*fn)(struct pg_file *file, void *arg);
	void (*undo)(struct pg_file *file, void *arg);
};

#define PG_OP(_cmd, _type, _last, _fn, _undo)			\
	[_IOC_NR(_cmd)] = {					\
		.cmd = (_cmd),					\
		.size = sizeof(_type),				\
		.min_size = offsetofend(_type, _last),		\
		.fn = (_fn),					\
		.undo = (_undo),				\
	}

static const struct pg_op pg_ops[] = {
	PG_OP(PEERGATE_INFO, struct peergate_info, max_mappings, pg_info, NULL),
	PG_OP(PEERGATE_ENDPOINT, struct peergate_endpoint, name, pg_endpoint, NULL),
	PG_OP(PEERGATE_RING, struct peergate_ring_setup, length, pg_ring_setup, NULL),
	PG_OP(PEERGATE_MAP, struct peergate_map, iova, pg_map, pg_map_undo),
	PG_OP(PEERGATE_UNMAP, struct peergate_unmap, length, pg_unmap, NULL),
	PG_OP(PEERGATE_ALLOC, struct peergate_alloc, iova, pg_alloc, pg_alloc_undo),
	PG_OP(PEERGATE_FREE, struct peergate_free, handle, pg_free, NULL),
	PG_OP(PEERGATE_PEER, struct peergate_peer, reason, pg_peer, NULL),
	PG_OP(PEERGATE_SUBMIT, struct peergate_submit, queue, pg_submit, NULL),
	PG_OP(PEERGATE_WAIT, struct peergate_wait, deadline_ns, pg_wait, NULL),
	PG_OP(PEERGATE_STREAM, struct peergate_stream, running, pg_stream, NULL),
};

/**
 * pg_find_op() - Find an ioctl.
 * @cmd: its number, with the size of the caller's structure
 *
 * Return: the ioctl, or NULL.
 */
static const struct pg_op *pg_find_op(unsigned int cmd)
{
	const struct pg_op *op;

	if (_IOC_NR(cmd) >= ARRAY_SIZE(pg_ops))
		return NULL;
	op = &pg_ops[array_index_nospec(_IOC_NR(cmd), ARRAY_SIZE(pg_ops))];
	return op->fn && (op->cmd & ~IOCSIZE_MASK) == (cmd & ~IOCSIZE_MASK) ? op : NULL;
}

/**
 * pg_ioctl() - An ioctl.
 * @filp: the file
 * @cmd: which one
 * @user: pointer to its structure
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno.
 */
static long pg_ioctl(struct file *filp, unsigned int cmd, unsigned long user)
{
	const struct pg_op *op = pg_find_op(cmd);
	struct pg_file *file = filp->private_data;
	void __user *uarg = (void __user *)user;
	union pg_arg arg = {};
	u32 size;
	int ret;

	if (!op)
		return -ENOTTY;
	if (!pg_is_live(file->dev) && op->fn != pg_wait)
		return -ENODEV;
	if (get_user(size, (u32 __user *)uarg))
		return -EFAULT;
	if (size < op->min_size)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	ret = copy_struct_from_user(&arg, op->size, uarg, size);
	if (ret)
		return ret;
	arg.size = size;
	ret = op->fn(file, &arg);
	if (ret || !(_IOC_DIR(op->cmd) & _IOC_READ))
		return ret;
	if (copy_to_user(uarg, &arg, min_t(u32, size, op->size))) {
		if (op->undo)
			op->undo(file, &arg);
		return -EFAULT;
	}
	return 0;
}

const struct file_operations pg_fops = {
	.owner = THIS_MODULE,
	.open = pg_open,
	.release = pg_release,
	.read = pg_read,
	.poll = pg_poll,
	.mmap = pg_mmap,
	.unlocked_ioctl = pg_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};
