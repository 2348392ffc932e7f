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
		atomic_dec(&file->session->domains);
		atomic_dec(&file->session->closing);
		wake_up_all(&dev->domain_wait);
	}
	pg_mem_destroy(file);
	pg_ring_destroy(file);
	kfifo_free(&file->events);
	if (file->detach)
		pg_msg_put(file->detach);
	pg_session_put(file->session);
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
 * then stays until the device begins anew. A device that did so already, and was
 * not told HELLO yet, refuses everything: that is looked into.
 *
 * Context: Process context.
 */
static void pg_detach_done(struct pg_msg *msg)
{
	struct pg_file *file = msg->owner;
	struct pg_device *dev = file->dev;

	switch (msg->error) {
	case 0:
	case -ENOENT:	/* it never came into being */
	case -ESTALE:	/* it went with the device's state */
	case -ENODEV:	/* the device was reset */
		pg_file_put(file);
		return;
	}
	dev_err_ratelimited(&dev->dev, "device does not end domain %u: %d\n", file->domain,
			    msg->error);
	spin_lock_irq(&dev->queues[VIRTIO_PEERGATE_VQ_CONTROL].lock);
	list_add_tail(&file->node, &dev->stranded);
	spin_unlock_irq(&dev->queues[VIRTIO_PEERGATE_VQ_CONTROL].lock);
	pg_session_suspect(dev);
}

/**
 * pg_files_rescue() - The device forgot every domain.
 * @dev: the device
 *
 * Context: Process context. Takes the control queue's lock.
 */
void pg_files_rescue(struct pg_device *dev)
{
	struct pg_file *file, *next;
	LIST_HEAD(stranded);

	spin_lock_irq(&dev->queues[VIRTIO_PEERGATE_VQ_CONTROL].lock);
	list_splice_init(&dev->stranded, &stranded);
	spin_unlock_irq(&dev->queues[VIRTIO_PEERGATE_VQ_CONTROL].lock);
	list_for_each_entry_safe(file, next, &stranded, node)
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
	atomic_inc(&file->session->closing);
	pg_msg_send(file->dev, file->detach);
}

/**
 * pg_domain_take() - Count a domain if there is one left.
 * @session: the session
 *
 * Context: Any.
 * Return: whether there was.
 */
static bool pg_domain_take(struct pg_session *session)
{
	return atomic_add_unless(&session->domains, 1, session->max_domains);
}

/**
 * pg_domain_reserve() - Count a domain, or wait for one that is about to end.
 * @dev: the device
 * @session: a session of it
 *
 * Context: Process context, sleeps for the module's time limit; a fatal signal
 * ends the wait.
 * Return: 0, -EDQUOT, -ENODEV or -EINTR.
 */
static int pg_domain_reserve(struct pg_device *dev, struct pg_session *session)
{
	unsigned long limit = msecs_to_jiffies(READ_ONCE(pg_control_timeout_ms));
	bool taken = pg_domain_take(session);

	if (!taken && wait_event_killable_timeout(dev->domain_wait,
						  (taken = pg_domain_take(session)) ||
						  !pg_is_live(dev) ||
						  !atomic_read(&session->closing),
						  limit) < 0)
		return -EINTR;
	/* The last one may have ended between two looks of the condition. */
	if (taken || pg_domain_take(session))
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
	file->session = pg_session_get(dev);
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
	file->detach = pg_msg_alloc(VIRTIO_PEERGATE_OP_DETACH, 0, file->session->number,
				    sizeof(*attach), 0);
	if (!file->detach) {
		ret = -ENOMEM;
		goto err_put;
	}
	ret = pg_domain_reserve(dev, file->session);
	if (ret)
		goto err_put;
	/* Numbers are not reused soon: late events find no wrong reader. */
	ret = xa_alloc_cyclic_irq(&dev->files, &domain, file, XA_LIMIT(1, INT_MAX),
				  &dev->next_domain, GFP_KERNEL);
	if (ret) {
		atomic_dec(&file->session->domains);
		goto err_put;
	}
	file->domain = domain;
	pg_msg_set_domain(file->detach, domain);
	attach = pg_msg_body(file->detach);
	attach->endpoint = cpu_to_le32(VIRTIO_PEERGATE_ENDPOINT_ALL);
	file->detach->drain_ms = file->session->max_timeout_ms;
	file->detach->finish = pg_detach_done;
	file->detach->owner = file;
	return file;

err_put:
	pg_file_put(file);
	return ERR_PTR(ret);
}

/**
 * pg_file_attach() - Attach every endpoint of its session to the file's domain.
 * @file: the file
 *
 * Context: Process context, sleeps.
 * Return: 0 or negative errno; some endpoints may be attached then.
 */
static int pg_file_attach(struct pg_file *file)
{
	const struct pg_session *session = file->session;
	struct virtio_peergate_attach attach = {};
	unsigned int i;
	int ret = 0;

	for (i = 0; !ret && i < session->endpoint_count; i++) {
		attach.endpoint = cpu_to_le32(session->endpoints[i].endpoint);
		ret = pg_request(file, VIRTIO_PEERGATE_OP_ATTACH, &attach, sizeof(attach), NULL, 0,
				 false);
	}
	return ret;
}

/**
 * pg_file_open() - Make a file and its domain.
 * @dev: the device
 *
 * Context: Process context, sleeps.
 * Return: the file or an error pointer.
 */
static struct pg_file *pg_file_open(struct pg_device *dev)
{
	struct pg_file *file = pg_file_alloc(dev);
	int ret;

	if (IS_ERR(file))
		return file;
	ret = pg_file_attach(file);
	if (ret) {
		pg_file_close(file);
		return ERR_PTR(ret);
	}
	return file;
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

	if (!pg_is_live(dev))
		return -ENODEV;
	file = pg_file_open(dev);
	if (file == ERR_PTR(-ESTALE) || file == ERR_PTR(-EINVAL)) {
		/* The device began a new session and could not tell, or waits for HELLO. */
		pg_session_suspect(dev);
		flush_work(&dev->config_work);
		file = pg_file_open(dev);
	}
	if (IS_ERR(file))
		return PTR_ERR(file);
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
	struct pg_ring *ring = pg_ring_of(file);

	if (!ring || vma->vm_pgoff != PEERGATE_MMAP_RING >> PAGE_SHIFT ||
	    vma->vm_end - vma->vm_start > ring->length || !(vma->vm_flags & VM_SHARED) ||
	    vma->vm_flags & VM_EXEC)
		return -EINVAL;
	vm_flags_clear(vma, VM_MAYEXEC);
	return remap_vmalloc_range(vma, ring->area, 0);
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
